"""Talk to SmolLM2, or to another Llama-family GGUF file, in the terminal.

Answers are streamed. Ctrl-C stops an answer, Ctrl-D ends the conversation, /clear begins a new one. If
standard input is no terminal, each of its lines is a question.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING

from engine_core.cli.messages import describe, say
from engine_core.cli.options import add_engine_options, engine_config
from engine_core.cli.parser import Parser, integer, positive_integer
from engine_core.cli.session import add_connect_option
from engine_core.cli.text import engine_defaults, open_model
from engine_core.client import EngineClient
from engine_core.errors import RequestError
from executor.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine_core_smollm2.tokenizer import Tokenizer


def add_arguments(parser: Parser) -> None:
    group = parser.add_argument_group("Conversation")
    group.add_argument("--system", metavar="TEXT", help="what the model is told first")
    group.add_argument(
        "--max-tokens",
        type=positive_integer,
        default=512,
        metavar="N",
        help="tokens of an answer (default: 512)",
    )
    group.add_argument(
        "--temperature", type=float, default=0.2, metavar="N", help="0: the likeliest token (default: 0.2)"
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=0.9,
        metavar="N",
        help="share of the mass to sample from (default: 0.9)",
    )
    group.add_argument("--sampling-seed", type=integer, metavar="N", help="seed of each answer's choices")
    add_connect_option(parser)
    add_engine_options(parser)


def run(parser: Parser, args: argparse.Namespace) -> int:
    _, tokenizer = open_model(parser, args)
    if tokenizer.chat_template is None:
        parser.error("the model has no chat template")
    config = engine_config(parser, args, **engine_defaults())
    if args.connect is None:
        client = EngineClient.launch(config, log_level=args.log_level)
    else:
        client = EngineClient.connect(args.connect)
    with client:
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            seed=args.sampling_seed,
            eos_token_id=tokenizer.eos_token_id,
        )
        return Conversation(client, tokenizer, params, args.system).run()


class Conversation:
    """Questions from standard input, answers to standard output, and what was said so far."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer, params: SamplingParams, system: str | None
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = []
        self._interactive = sys.stdin.isatty()

    def run(self) -> int:
        """Until there are no more questions. 1 if one could not be answered."""
        if self._interactive:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() its line editing
            say("Ctrl-C stops an answer, Ctrl-D ends, /clear starts anew.")
        status = 0
        while (question := self._read()) is not None:
            if question == "/clear":
                self._messages = []
            elif question:
                status = self._answer(question)
        return status

    def _read(self) -> str | None:
        """The next question; None at the end."""
        while True:
            try:
                return input("> " if self._interactive else "").strip()
            except EOFError:
                if self._interactive:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                print()

    def _answer(self, question: str) -> int:
        """Print the answer as it comes, and remember both."""
        from engine_core_smollm2.tokenizer import TextStream

        self._messages.append({"role": "user", "content": question})
        prompt = self._prompt()
        text = TextStream(self._tokenizer)
        said = ""
        status = 0
        try:
            for output in self._client.generate(prompt, self._params):  # aborted if it is not read to its end
                piece = "".join(map(text.add, output.new_token_ids))
                print(piece, end="", flush=True)
                said += piece
                if output.finish_reason == "abort":
                    say("engine-core chat: the engine ended the answer before it was done")
                    status = 1
        except KeyboardInterrupt:
            if not self._interactive:
                raise
        except RequestError as error:
            say(f"engine-core chat: {describe(error)}")
            status = 1
        tail = text.end()
        print(tail)
        self._messages.append({"role": "assistant", "content": said + tail})
        return status

    def _prompt(self) -> list[int]:
        """The conversation as token ids. Its oldest turns are forgotten when it would leave no room for the
        answer."""
        room = self._client.info.max_model_len - (self._params.max_tokens or 0)
        while True:
            prompt = self._tokenizer.encode(self._tokenizer.chat([*self._system, *self._messages]))
            if len(prompt) <= room or len(self._messages) == 1:
                return prompt
            del self._messages[:2]
