"""Token ids in, token ids out; or text, with --text.

A prompt is a list of token ids, blank or comma separated: the arguments together are one prompt; in a file
or on standard input each line is one. Outputs go to standard output, a line for each prompt, in the order
of the prompts. With --text prompts and outputs are text, continued by SmolLM2 or the GGUF file of --model.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from engine_core.cli.messages import describe, say
from engine_core.cli.options import add_engine_options, engine_config
from engine_core.cli.parser import Parser, integer, positive_integer
from engine_core.cli.session import add_connect_option, open_client, run_until_done
from engine_core.cli.text import engine_defaults, open_model
from engine_core.client import AsyncEngineClient, RequestOutput
from engine_core.config import EngineConfig
from engine_core.errors import RequestError
from engine_core.protocol import LogprobsLists
from executor.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine_core_smollm2.tokenizer import Tokenizer

Deltas = asyncio.Queue["RequestOutput | Exception | None"]

ABORTED = "abort"  # the finish reason of a request that was not done


def add_arguments(parser: Parser) -> None:
    prompts = parser.add_argument_group("Prompts")
    prompts.add_argument("token_ids", nargs="*", metavar="ID", help="token ids (or the words) of one prompt")
    prompts.add_argument(
        "--prompt-file",
        metavar="FILE",
        help="prompts, one a line; - is standard input, the default without an ID",
    )
    prompts.add_argument("--text", action="store_true", help="prompts and outputs are text")
    prompts.add_argument("--json", action="store_true", help="an object for each prompt, with why it ended")
    sampling = parser.add_argument_group("Sampling")
    sampling.add_argument(
        "--max-tokens", type=positive_integer, default=16, metavar="N", help="tokens at most"
    )
    sampling.add_argument("--min-tokens", type=integer, default=0, metavar="N", help="tokens at least")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="N", help="0: the likeliest token"
    )
    sampling.add_argument(
        "--top-p", type=float, default=1.0, metavar="N", help="share of the mass to sample from"
    )
    sampling.add_argument(
        "--top-k", type=integer, default=0, metavar="N", help="tokens to sample from; 0: all"
    )
    sampling.add_argument("--sampling-seed", type=integer, metavar="N", help="seed of each request's choices")
    sampling.add_argument("--eos-token-id", type=integer, metavar="ID", help="stop at this token")
    sampling.add_argument("--stop-token-ids", type=integer, nargs="+", metavar="ID", help="stop at these")
    sampling.add_argument("--logprobs", type=integer, metavar="K", help="with --json: of the K likeliest")
    add_connect_option(parser)
    add_engine_options(parser)


def run(parser: Parser, args: argparse.Namespace) -> int:
    tokenizer = open_model(parser, args)[1] if args.text else None
    prompts = _prompts(parser, args, tokenizer)
    if tokenizer is not None and args.eos_token_id is None:
        args.eos_token_id = tokenizer.eos_token_id
    stops = [*(args.stop_token_ids or ()), *(() if args.eos_token_id is None else (args.eos_token_id,))]
    params = SamplingParams(
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        seed=args.sampling_seed,
        eos_token_id=args.eos_token_id,
        stop_token_ids=args.stop_token_ids,
        all_stop_token_ids=stops,
        logprobs=args.logprobs,
    )
    config = engine_config(parser, args, **(engine_defaults() if args.text else {}))
    return run_until_done(_generate(args, config, prompts, params, tokenizer))


async def _generate(
    args: argparse.Namespace,
    config: EngineConfig,
    prompts: list[list[int]],
    params: SamplingParams,
    tokenizer: Tokenizer | None,
) -> int:
    status = 0
    async with open_client(args.connect, config, args.log_level) as client:
        # All are sent at once, and printed in their order, each as it comes when its turn has come.
        queues: list[Deltas] = [asyncio.Queue() for _ in prompts]
        receivers = [
            asyncio.ensure_future(_receive(client, prompt, params, queue))
            for prompt, queue in zip(prompts, queues, strict=True)
        ]
        try:
            for index, queue in enumerate(queues):
                if args.json:
                    error = await _show_json(index, queue, tokenizer)
                elif tokenizer is not None:
                    error = await _show_text(queue, tokenizer)
                else:
                    error = await _show_ids(queue)
                if error is not None:
                    say(f"engine-core generate: prompt {index + 1}: {describe(error)}")
                    status = 1
        finally:
            for receiver in receivers:
                receiver.cancel()
            await asyncio.gather(*receivers, return_exceptions=True)
    return status


async def _receive(
    client: AsyncEngineClient, prompt: list[int], params: SamplingParams, queue: Deltas
) -> None:
    """Puts the deltas, then None or the error that ended the request."""
    try:
        async for output in client.generate(prompt, params):
            queue.put_nowait(output)
    except Exception as error:  # given to whoever prints this request
        queue.put_nowait(error)
    else:
        queue.put_nowait(None)


async def _deltas(queue: Deltas) -> AsyncIterator[RequestOutput]:
    while (item := await queue.get()) is not None:
        if isinstance(item, Exception):
            raise item
        yield item
        if item.finish_reason == ABORTED:
            raise RequestError(ABORTED, "the engine ended it before it was done", True)


async def _show_ids(queue: Deltas) -> RequestError | None:
    """Prints the ids of one output on one line, each when it is there."""
    separator = ""
    error = None
    try:
        async for output in _deltas(queue):
            for token in output.new_token_ids:
                print(separator, token, sep="", end="", flush=True)
                separator = " "
    except RequestError as refusal:
        error = refusal
    print(flush=True)
    return error


async def _show_text(queue: Deltas, tokenizer: Tokenizer) -> RequestError | None:
    """Prints one output as it comes."""
    from engine_core_smollm2.tokenizer import TextStream

    text = TextStream(tokenizer)
    error = None
    try:
        async for output in _deltas(queue):
            print("".join(map(text.add, output.new_token_ids)), end="", flush=True)
    except RequestError as refusal:
        error = refusal
    print(text.end(), flush=True)
    return error


async def _show_json(index: int, queue: Deltas, tokenizer: Tokenizer | None) -> RequestError | None:
    """Prints one output as an object on one line, when it is complete."""
    shown: dict[str, Any] = {"prompt": index, "token_ids": [], "finish_reason": None, "stop_reason": None}
    error = None
    logprobs: list[dict[str, Any]] = []
    try:
        async for output in _deltas(queue):
            shown["token_ids"] += list(output.new_token_ids)
            shown["finish_reason"] = output.finish_reason
            shown["stop_reason"] = output.stop_reason
            if output.num_cached_tokens is not None:
                shown["num_cached_tokens"] = output.num_cached_tokens
            if output.logprobs is not None:
                logprobs += _lines(output.logprobs)
    except RequestError as refusal:
        error = refusal
        shown["finish_reason"] = ABORTED if refusal.code == ABORTED else "error"
        shown["error"] = {"code": refusal.code, "message": refusal.message}
    if logprobs:
        shown["logprobs"] = logprobs
    if tokenizer is not None:
        shown["text"] = tokenizer.decode(shown["token_ids"])
    print(msgspec.json.encode(shown).decode(), flush=True)
    return error


def _lines(logprobs: LogprobsLists) -> list[dict[str, Any]]:
    """One object for each sampled token: its rank, and the tokens judged beside it, itself first."""
    rows = zip(
        logprobs.logprob_token_ids.tolist(),
        logprobs.logprobs.tolist(),
        logprobs.sampled_token_ranks.tolist(),
        strict=True,
    )
    return [{"rank": rank, "token_ids": ids, "logprobs": values} for ids, values, rank in rows]


def _prompts(parser: Parser, args: argparse.Namespace, tokenizer: Tokenizer | None) -> list[list[int]]:
    if args.token_ids and args.prompt_file:
        parser.error("give token ids or --prompt-file, not both")
    if args.token_ids:
        words = " ".join(args.token_ids)
        return [tokenizer.encode(words) if tokenizer is not None else _ids(parser, words, "argument ID")]
    if args.prompt_file in (None, "-"):
        if sys.stdin.isatty():
            parser.error("a prompt is missing: token ids, --prompt-file or standard input")
        name, lines = "standard input", sys.stdin.read().splitlines()
    else:
        name, lines = args.prompt_file, Path(args.prompt_file).read_text().splitlines()
    prompts = [
        tokenizer.encode(line) if tokenizer is not None else _ids(parser, line, f"{name}, line {number}")
        for number, line in enumerate(lines, 1)
        if line.strip()
    ]
    if not prompts:
        parser.error(f"{name} holds no prompt")
    return prompts


def _ids(parser: Parser, text: str, where: str) -> list[int]:
    words = re.split(r"[\s,]+", text.strip().strip("[]").strip())
    wrong = next((word for word in words if not re.fullmatch(r"-?\d+", word)), None)
    if wrong is not None:
        parser.error(f"{where}: {wrong!r} is no token id")
    return [int(word) for word in words]
