"""Serve a trace or generated traffic in virtual time: the real scheduler, on workers that a latency model
stands for.

Nothing sleeps and no process is started; equal inputs give equal results to the byte. Traces are those of
`replay`; without one, traffic is generated at --rate. The engine's options mean what they mean to `serve`.
"""

from __future__ import annotations

import argparse
import csv
import shlex
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import msgspec

from engine_core.cli.messages import say, writing
from engine_core.cli.options import add_engine_options, engine_config, flag
from engine_core.cli.parser import Parser, positive_float, positive_integer
from engine_core.config import ConfigError, EngineConfig, field_types
from engine_core.lab.latency import LatencyError, parse_latency
from engine_core.lab.load import GeneratedLoad, LoadError, at_rate, at_speed, parse_lengths
from engine_core.lab.metrics import RequestResult, SimulationReport, Slo, table
from engine_core.lab.pictures import PictureError, check_picture, draw_sweep, draw_timelines
from engine_core.lab.routing import ROUTING_POLICIES, RoutingError, parse_routing
from engine_core.lab.simulation import Simulation
from engine_core.lab.sweep import Point, Sweep, SweepError, knee, parse_sweep, sweep_table
from engine_core.lab.timeline import Timeline
from engine_core.replay.prefix import unbounded_prefix_hits
from engine_core.replay.traces import HASH_BLOCK_TOKENS, TraceRequest, load_trace
from executor.base import EngineCapacity
from executor.mock_worker import MockOptions
from transport.clock import SYSTEM_CLOCK

# Of no device in particular.
DEFAULT_LATENCY = "step_ms=5,prefill_us_per_token=20,decode_us_per_seq=20,kv_ns_per_token=10"
_LINE_EVERY_S = 5.0
_MOST_BAD_LINES_SHOWN = 10
T = TypeVar("T")


def add_arguments(parser: Parser) -> None:
    _add_load_options(parser)
    group = parser.add_argument_group("Workers and engines")
    group.add_argument(
        "--latency",
        type=_checked_text(parse_latency, LatencyError, OSError),
        metavar="MODEL",
        help="how long a step takes: step_ms=A,prefill_us_per_token=B,decode_us_per_seq=C,kv_ns_per_token=D, "
        "a table FILE.json that profile-worker wrote, or package.module:function (default: the mock's times "
        f"if they are set, else {DEFAULT_LATENCY})",
    )
    group.add_argument(
        "--engines", type=positive_integer, default=1, metavar="N", help="engines, each with its own KV cache"
    )
    group.add_argument(
        "--routing",
        type=_checked_text(parse_routing, RoutingError),
        default="round-robin",
        metavar="POLICY",
        help=f"which engine gets a request: {', '.join(ROUTING_POLICIES)} or package.module:Class",
    )
    group = parser.add_argument_group("Report")
    group.add_argument(
        "--slo-ttft-ms",
        type=positive_float,
        metavar="MS",
        help="a request is good if its first token comes within MS",
    )
    group.add_argument(
        "--slo-itl-ms",
        type=positive_float,
        metavar="MS",
        help="and if its tokens follow each other within MS on average",
    )
    group.add_argument("--json", action="store_true", help="print the report as one JSON object")
    group.add_argument("--csv", metavar="FILE", help="write a line for each request, in the order they end")
    group.add_argument(
        "--plot",
        type=_checked_text(check_picture, PictureError),
        metavar="FILE",
        help="draw the run over time, or the sweep, to FILE.png or FILE.svg",
    )
    group.add_argument(
        "--sweep",
        type=_checked(parse_sweep, SweepError),
        metavar="NAME=VALUES",
        help="simulate once for each value of the rate or of an option of the engine: rate=1..20, "
        "rate=0.5..4..0.5, num-gpu-blocks-override=1000,5000; a sweep of the rate finds its knee",
    )
    group.add_argument(
        "--versus",
        type=_label_and_options,
        action="append",
        default=[],
        metavar="LABEL=OPTIONS",
        help="simulate once more with these options beside the others, and report and draw both: "
        "--versus 'no cache=--no-enable-prefix-caching'; may be repeated",
    )
    add_engine_options(parser)


def _add_load_options(parser: Parser) -> None:
    group = parser.add_argument_group("Load")
    group.add_argument(
        "trace",
        metavar="TRACE",
        nargs="?",
        help="Mooncake JSON lines or Azure CSV (default: generated traffic)",
    )
    group.add_argument(
        "--max-requests", type=positive_integer, metavar="N", help="only the first N of the trace"
    )
    group.add_argument(
        "--strict",
        action="store_true",
        help="refuse a trace with malformed lines (default: name them and pass over them)",
    )
    group.add_argument(
        "--speed", type=positive_float, metavar="X", help="send a trace X times as fast as recorded"
    )
    group.add_argument(
        "--rate",
        type=positive_float,
        metavar="R",
        help="requests a second on average; the gaps of a trace are stretched alike",
    )
    group = parser.add_argument_group("Generated load")
    group.add_argument("--num-requests", type=positive_integer, default=1000, metavar="N", help="how many")
    group.add_argument(
        "--input-length",
        type=_checked(parse_lengths, LoadError),
        default="lognormal:512:1",
        metavar="DIST",
        help="prompt tokens: N, uniform:LOW:HIGH, exponential:MEAN or lognormal:MEDIAN:SIGMA",
    )
    group.add_argument(
        "--output-length",
        type=_checked(parse_lengths, LoadError),
        default="lognormal:128:0.7",
        metavar="DIST",
        help="output tokens, in the same words",
    )
    group.add_argument(
        "--burstiness",
        type=_number_from(0.0, 100.0),
        default=1.0,
        metavar="CV",
        help="standard deviation of the gaps between arrivals, in multiples of their mean: 1 is Poisson, "
        "0 a metronome; gaps are gamma distributed",
    )
    group.add_argument(
        "--shared-prefix-ratio",
        type=_number_from(0.0, 1.0),
        default=0.0,
        metavar="X",
        help="share of each prompt that is the same in all prompts of its group",
    )
    group.add_argument(
        "--prefix-groups", type=positive_integer, default=1, metavar="N", help="groups of prompts"
    )


def _checked(parse: Callable[[str], T], *errors: type[Exception]) -> Callable[[str], T]:
    """`parse` as a type of argparse: what it raises becomes a usage error."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except errors as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _checked_text(parse: Callable[[str], object], *errors: type[Exception]) -> Callable[[str], str]:
    """As `_checked`, but keeps the text: it is parsed anew for each simulation."""

    def parsed(text: str) -> str:
        _checked(parse, *errors)(text)
        return text

    return parsed


def _number_from(low: float, high: float) -> Callable[[str], float]:
    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"invalid number {text!r}") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} must be from {low:g} to {high:g}")
        return value

    return parsed


def _label_and_options(text: str) -> tuple[str, list[str]]:
    label, separator, options = text.partition("=")
    if not separator or not label:
        raise argparse.ArgumentTypeError(f"{text!r} must read LABEL=OPTIONS")
    return label.strip(), shlex.split(options)


def run(parser: Parser, args: argparse.Namespace) -> int:
    scenarios = {"": args} if not args.versus else {"base": args}
    for label, options in args.versus:
        if label in scenarios:
            parser.error(f"--versus: there are two of the label {label!r}")
        scenarios[label] = _with_options(parser, args, options)
    for scenario in scenarios.values():
        _check_options(parser, scenario)
    prepared = {
        label: Scenario(parser, scenario, engine_config(parser, scenario, log_stats=False))
        for label, scenario in scenarios.items()
    }
    return _sweep(args, prepared) if args.sweep is not None else _simulate(args, prepared)


def _with_options(parser: Parser, args: argparse.Namespace, options: list[str]) -> argparse.Namespace:
    changed = parser.parse_args(options, argparse.Namespace(**vars(args)))
    if changed.trace is None:  # argparse resets it
        changed.trace = args.trace
    return changed


def _check_options(parser: Parser, args: argparse.Namespace) -> None:
    sweeps_rate = args.sweep is not None and args.sweep[0] == "rate"
    if args.trace is None and args.rate is None and not sweeps_rate:
        parser.error("give a TRACE, or a --rate for generated traffic")
    if args.speed is not None and (args.trace is None or args.rate is not None or sweeps_rate):
        parser.error("--speed is for a TRACE, and excludes a rate")
    if args.csv is not None and (args.sweep is not None or args.versus):
        parser.error("--csv is for one simulation, without --sweep and --versus")


def _simulate(args: argparse.Namespace, scenarios: dict[str, Scenario]) -> int:
    reports, timelines = {}, []
    with _csv_writer(args.csv) as on_result:
        for label, scenario in scenarios.items():
            reports[label], timeline = scenario.simulate(scenario.config, scenario.args.rate, on_result)
            timelines.append((label, timeline))
    if args.plot is not None:
        with writing(args.plot):
            draw_timelines(timelines, args.plot)
    _print(args, reports, table)
    return 0


def _sweep(args: argparse.Namespace, scenarios: dict[str, Scenario]) -> int:
    name, values = args.sweep
    sweeps = {}
    for label, scenario in scenarios.items():
        points = []
        for value in values:
            if name == "rate":
                report, _ = scenario.simulate(scenario.config, value)
            else:
                report, _ = scenario.simulate(scenario.varied(name, value), scenario.args.rate)
            points.append(Point(value, report))
            say(f"{label} {name} {value:g} done".strip())
        sweeps[label] = Sweep(name, points, knee(points) if name == "rate" else None)
    if args.plot is not None:
        with writing(args.plot):
            draw_sweep(list(sweeps.items()), args.plot)
    _print(args, sweeps, sweep_table)
    return 0


def _print(args: argparse.Namespace, results: dict[str, T], as_table: Callable[[T], str]) -> None:
    """One result as it is; several under their labels."""
    if args.json:
        print(msgspec.json.encode(results if args.versus else results[""]).decode())
    elif args.versus:
        print("\n\n".join(f"[{label}]\n{as_table(result)}" for label, result in results.items()))
    else:
        print(as_table(results[""]))


class Outcome(NamedTuple):
    report: SimulationReport
    timeline: Timeline


class Scenario:
    """What a command line asks for, ready to be simulated once or several times."""

    def __init__(self, parser: Parser, args: argparse.Namespace, config: EngineConfig) -> None:
        self.args = args
        self.config = config
        self._parser = parser
        self._mock = _mock_options(config)
        if config.record:
            parser.error("--record: a simulation has no token ids to record")
        if self._mock.mock_jitter:
            parser.error("--mock-jitter: simulated workers do not vary at random")
        self._latency_text = args.latency or self._mock_latency() or DEFAULT_LATENCY
        self._bad_lines = 0
        self._trace: list[TraceRequest] | None = None
        self._unbounded_hits: dict[int, int] = {}  # by block size
        if args.trace is not None:
            on_bad_line = None if args.strict else self._pass_over
            self._trace = load_trace(args.trace, args.max_requests, on_bad_line)
            if self._bad_lines > _MOST_BAD_LINES_SHOWN:
                say(f"passed over {self._bad_lines} malformed lines in all")

    def _pass_over(self, error: Exception) -> None:
        self._bad_lines += 1
        if self._bad_lines <= _MOST_BAD_LINES_SHOWN:
            say(f"passed over {error}")

    def _mock_latency(self) -> str | None:
        """The latency model that the mock's options describe, if they do."""
        mock = self._mock
        terms = {
            "step_ms": mock.mock_step_ms,
            "prefill_us_per_token": mock.mock_prefill_us_per_token,
            "decode_us_per_seq": mock.mock_decode_us_per_seq,
        }
        return ",".join(f"{name}={value:g}" for name, value in terms.items()) if any(terms.values()) else None

    def varied(self, name: str, value: float) -> EngineConfig:
        """The configuration with one option changed."""
        field = name.replace("-", "_")
        if field not in field_types():
            self._parser.error(f"--sweep: there is no option --{name}")
        exact = int(value) if value == int(value) else value
        config = msgspec.structs.replace(self.config, **{field: exact})
        try:
            config.validate()
        except ConfigError as error:
            self._parser.error(f"{flag(error.field)} {error.value}: {error.reason}")
        return config

    def simulate(
        self,
        config: EngineConfig,
        rate: float | None,
        on_result: Callable[[RequestResult], None] = lambda result: None,
    ) -> Outcome:
        args = self.args
        capacity = EngineCapacity(
            num_gpu_blocks=config.num_gpu_blocks_override or self._mock.mock_num_blocks,
            vocab_size=self._mock.vocab_size,
            max_model_len=config.max_model_len or self._mock.mock_max_model_len,
            dtype="float32",
        )
        simulation = Simulation(
            config,
            capacity,
            parse_latency(self._latency_text),
            num_engines=args.engines,
            routing=parse_routing(args.routing),
            slo=Slo(args.slo_ttft_ms, args.slo_itl_ms),
            on_result=on_result,
        )
        simulation.run(_with_progress(self._load(config, rate), simulation))
        report = simulation.report(self._latency_text, self._hits_at_most(config.block_size), self._bad_lines)
        return Outcome(report, simulation.metrics.timeline)

    def _load(self, config: EngineConfig, rate: float | None) -> Iterable[TraceRequest]:
        args, trace = self.args, self._trace
        if trace is not None:
            return at_rate(trace, rate) if rate is not None else at_speed(trace, args.speed or 1.0)
        assert rate is not None  # `run` has checked
        return GeneratedLoad(
            rate=rate,
            num_requests=args.num_requests,
            input_lengths=args.input_length,
            output_lengths=args.output_length,
            burstiness=args.burstiness,
            shared_prefix_ratio=args.shared_prefix_ratio,
            prefix_groups=args.prefix_groups,
            seed=config.seed,
        )

    def _hits_at_most(self, block_size: int) -> int | None:
        """Prefix-hit tokens of a cache that never evicts; None where the trace does not tell."""
        trace = self._trace
        if trace is None or trace[0].hash_ids is None or HASH_BLOCK_TOKENS % block_size:
            return None
        if block_size not in self._unbounded_hits:
            self._unbounded_hits[block_size] = sum(unbounded_prefix_hits(trace, block_size))
        return self._unbounded_hits[block_size]


def _mock_options(config: EngineConfig) -> MockOptions:
    """What the mock worker would make of the options; those of other workers mean nothing here."""
    known = {
        name: value for name, value in config.worker_options.items() if name in MockOptions.__struct_fields__
    }
    return msgspec.convert(known, MockOptions, strict=False)


def _with_progress(load: Iterable[TraceRequest], simulation: Simulation) -> Iterator[TraceRequest]:
    """The load, with a line on stderr at times while it is taken."""
    clock = SYSTEM_CLOCK
    begun_s = clock.monotonic()
    next_s = begun_s + _LINE_EVERY_S
    for number, request in enumerate(load):
        now_s = clock.monotonic()
        if now_s >= next_s:
            next_s = now_s + _LINE_EVERY_S
            say(
                f"{number:,} requests arrived, {simulation.metrics.last_s:,.0f} s simulated "
                f"in {now_s - begun_s:.0f} s"
            )
        yield request


@contextmanager
def _csv_writer(path: str | None) -> Iterator[Callable[[RequestResult], None]]:
    if path is None:
        yield lambda result: None
        return
    with writing(path), open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(RequestResult.__struct_fields__)
        yield lambda result: writer.writerow(msgspec.structs.astuple(result))
