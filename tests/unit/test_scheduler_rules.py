"""One rule at a time: when requests end, what their outputs carry, who may run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_core.config import EngineConfig
from engine_core.errors import RequestError
from engine_core.protocol import EngineCoreOutput, EventType, FinishReason
from engine_core.request import Status
from engine_core.scheduler.scheduler import PauseState, Scheduler
from executor.sampling_params import RepetitionDetectionParams
from executor.step import Logprobs, LoRARequest, ModelRunnerOutput, PromptLogprobs
from tests.scheduling import all_outputs, answer, make_request, run_step


class ManualClock:
    """Time stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return self.now


def make_scheduler(num_blocks: int = 100, max_model_len: int = 1000, **fields: Any) -> Scheduler:
    fields = {"async_scheduling": False, "max_num_seqs": 8, "max_num_batched_tokens": 64, **fields}
    return Scheduler(EngineConfig(**fields), num_blocks, max_model_len, ManualClock())


def feed(scheduler: Scheduler, request_id: str, tokens: list[int]) -> EngineCoreOutput:
    """One step for each token; the last step's output."""
    output = None
    for token in tokens:
        output = all_outputs(run_step(scheduler, token))[request_id]
    assert output is not None
    return output


class TestStopRules:
    """In order: EOS, stop ids, length, then repetition, which min_tokens holds back."""

    def ends(self, tokens: list[int], **params: Any) -> tuple[FinishReason | None, int | str | None]:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("r", [1, 2, 3], scheduler, **params))
        output = feed(scheduler, "r", tokens)
        if output.finish_reason is not None:
            assert scheduler.requests == {} and scheduler.kv.pool.usage == 0.0
        return output.finish_reason, output.stop_reason

    def test_eos(self) -> None:
        assert self.ends([5, 2], eos_token_id=2) == (FinishReason.STOP, None)

    def test_without_an_eos_id_any_token_goes_on(self) -> None:
        assert self.ends([0, 2]) == (None, None)

    def test_a_stop_id_is_the_reason(self) -> None:
        assert self.ends([5, 9], stop_token_ids=[8, 9]) == (FinishReason.STOP, 9)

    def test_eos_comes_before_a_stop_id(self) -> None:
        assert self.ends([5, 2], eos_token_id=2, stop_token_ids=[2]) == (FinishReason.STOP, None)

    def test_a_stop_id_comes_before_length(self) -> None:
        assert self.ends([5, 9], max_tokens=2, stop_token_ids=[9]) == (FinishReason.STOP, 9)

    def test_length(self) -> None:
        assert self.ends([5, 5], max_tokens=2) == (FinishReason.LENGTH, None)

    def test_min_tokens_does_not_hold_back_eos(self) -> None:
        """The worker masks EOS until then; one that comes all the same ends the request, as in vLLM."""
        assert self.ends([2], eos_token_id=2, min_tokens=5) == (FinishReason.STOP, None)

    def test_repetition(self) -> None:
        detection = RepetitionDetectionParams(max_pattern_size=2, min_count=3)
        reason = (FinishReason.REPETITION, "repetition_detected")
        assert self.ends([4, 5, 4, 5, 4, 5], repetition_detection=detection) == reason
        assert self.ends([1, 4, 4, 4], repetition_detection=detection) == reason
        assert self.ends([4, 5, 4, 5, 4], repetition_detection=detection) == (None, None)

    def test_min_tokens_holds_back_repetition(self) -> None:
        detection = RepetitionDetectionParams(max_pattern_size=1, min_count=2)
        assert self.ends([4, 4, 4], repetition_detection=detection, min_tokens=4) == (None, None)
        assert self.ends([4, 4, 4, 4], repetition_detection=detection, min_tokens=4)[0] == 4

    def test_repetition_looks_at_the_output_only(self) -> None:
        scheduler = make_scheduler()
        detection = RepetitionDetectionParams(max_pattern_size=1, min_count=3)
        scheduler.add_request(make_request("r", [7] * 20, scheduler, repetition_detection=detection))
        assert feed(scheduler, "r", [7, 7]).finish_reason is None
        assert feed(scheduler, "r", [7]).finish_reason is FinishReason.REPETITION

    def test_repetition_across_blocks_and_preemptions(self) -> None:
        scheduler = make_scheduler(block_size=4)
        detection = RepetitionDetectionParams(max_pattern_size=7, min_pattern_size=7, min_count=2)
        scheduler.add_request(
            make_request("r", [1, 2], scheduler, repetition_detection=detection, max_tokens=50)
        )
        feed(scheduler, "r", [11, 12, 13, 14, 15, 16, 17, 11])
        assert scheduler.reset_prefix_cache(reset_running=True)
        assert feed(scheduler, "r", [12, 13, 14, 15, 16]).finish_reason is None
        assert feed(scheduler, "r", [17]).finish_reason is FinishReason.REPETITION

    @pytest.mark.parametrize("is_async", [False, True])
    def test_the_models_length(self, is_async: bool) -> None:
        scheduler = make_scheduler(max_model_len=20, async_scheduling=is_async)
        scheduler.add_request(make_request("r", [1] * 15, scheduler, max_tokens=None))
        assert feed(scheduler, "r", [5] * 5).finish_reason is FinishReason.LENGTH

    def test_a_request_that_fills_the_whole_cache_ends_by_length(self) -> None:
        """vLLM would preempt it for ever."""
        scheduler = make_scheduler(num_blocks=3, max_model_len=1000)
        scheduler.add_request(make_request("r", [1] * 30, scheduler, max_tokens=500))
        scheduler.add_request(make_request("next", [1] * 3, scheduler, max_tokens=1))
        assert (
            feed(scheduler, "r", [5] * 3).finish_reason is FinishReason.LENGTH
        )  # 32 tokens have KV, 33 are known
        assert feed(scheduler, "next", [5]).finish_reason is FinishReason.LENGTH


class TestOutputs:
    def test_the_first_tells_how_the_prompt_was_computed(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", list(range(40)), scheduler, max_tokens=1))
        stats = feed(scheduler, "a", [7]).prefill_stats
        assert stats is not None
        assert (stats.num_prompt_tokens, stats.num_computed_tokens, stats.num_cached_tokens) == (40, 40, 0)
        assert stats.num_cache_creation_tokens == 32
        scheduler.add_request(make_request("b", list(range(40)), scheduler))
        stats = feed(scheduler, "b", [7]).prefill_stats
        assert stats is not None
        assert (stats.num_computed_tokens, stats.num_cached_tokens, stats.num_local_cached_tokens) == (
            8,
            32,
            32,
        )
        assert stats.num_cache_creation_tokens == 0
        assert feed(scheduler, "b", [7]).prefill_stats is None

    def test_events_tell_times(self) -> None:
        scheduler = make_scheduler()
        clock = scheduler.clock
        assert isinstance(clock, ManualClock)
        scheduler.add_request(make_request("r", [1], scheduler))
        clock.now = 101.0
        events = feed(scheduler, "r", [7]).events
        assert events is not None
        assert [(e.type, e.timestamp) for e in events] == [
            (EventType.QUEUED, 100.0),
            (EventType.SCHEDULED, 101.0),
        ]
        clock.now = 102.0
        assert scheduler.reset_prefix_cache(reset_running=True)
        clock.now = 103.0
        events = feed(scheduler, "r", [7]).events
        assert events is not None
        assert [(e.type, e.timestamp) for e in events] == [
            (EventType.PREEMPTED, 102.0),
            (EventType.SCHEDULED, 103.0),
        ]

    def test_no_statistics_means_no_events(self) -> None:
        scheduler = make_scheduler(log_stats=False)
        scheduler.add_request(make_request("r", [1], scheduler))
        outputs = run_step(scheduler)
        assert outputs[0].outputs[0].events is None
        assert outputs[0].scheduler_stats is None

    def test_plain_tokens_are_columns_by_client(self) -> None:
        scheduler = make_scheduler()
        for i in range(6):
            scheduler.add_request(make_request(f"r{i}", [1, i], scheduler, client_index=i % 2))
        run_step(scheduler)
        outputs = run_step(scheduler, 9)
        assert sorted(outputs) == [0, 1]
        for client, mine in ((0, ["r0", "r2", "r4"]), (1, ["r1", "r3", "r5"])):
            assert [request.request_id for request in outputs[client].requests] == mine
            assert outputs[client].token_ids.tolist() == [9, 9, 9]
            assert outputs[client].outputs == []

    def test_statistics_go_to_one_client(self) -> None:
        scheduler = make_scheduler()
        for i in (2, 1):
            scheduler.add_request(make_request(f"r{i}", [1, i], scheduler, client_index=i))
        outputs = run_step(scheduler)
        assert [outputs[client].scheduler_stats is not None for client in (2, 1)] == [True, False]
        stats = outputs[2].scheduler_stats
        assert stats is not None and stats.num_running_reqs == 2
        assert (stats.prefix_cache_stats.requests, stats.prefix_cache_stats.queries) == (2, 4)

    def test_ended_requests_are_named_if_asked_for(self) -> None:
        scheduler = Scheduler(EngineConfig(async_scheduling=False), 100, 1000, track_finished=True)
        scheduler.add_request(make_request("ends", [1], scheduler, max_tokens=1, client_index=1))
        scheduler.add_request(make_request("aborted", [1], scheduler, client_index=2))
        scheduler.finish_requests(["aborted"], FinishReason.ABORT)
        outputs = run_step(scheduler)
        assert outputs[1].finished_requests == ["ends"]
        assert outputs[2].finished_requests == ["aborted"] and outputs[2].outputs == []

    def test_trace_headers_come_back(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("r", [1], scheduler, max_tokens=1, trace_headers={"a": "b"}))
        assert feed(scheduler, "r", [7]).trace_headers == {"a": "b"}


class TestLogprobs:
    def test_of_sampled_tokens_in_the_width_asked_for(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("none", [1], scheduler))
        scheduler.add_request(make_request("two", [2], scheduler, logprobs=2))
        scheduler.add_request(make_request("all", [3], scheduler, logprobs=-1))
        scheduler.add_request(make_request("given", [4], scheduler, logprobs=0, logprob_token_ids=[5]))
        step = scheduler.schedule()
        plain = answer(scheduler, step)
        ids = np.arange(12, dtype=np.int32).reshape(3, 4)
        plain.logprobs = Logprobs(
            np.array([1, 2, 3], np.int32), ids, ids.astype(np.float32), np.array([7, 8, 9], np.int32)
        )
        outputs = all_outputs(scheduler.update_from_output(step, plain))
        assert outputs["none"].new_logprobs is None
        for request_id, width, rank in (("two", 3, 7), ("all", 4, 8), ("given", 2, 9)):
            found = outputs[request_id].new_logprobs
            assert found is not None
            assert found.logprob_token_ids.shape == found.logprobs.shape == (1, width)
            assert found.sampled_token_ranks.tolist() == [rank]
        assert outputs["all"].new_logprobs.logprob_token_ids.tolist() == [[4, 5, 6, 7]]  # type: ignore[union-attr]

    def test_of_the_prompt_come_whole_with_the_first_output(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        scheduler.add_request(make_request("r", list(range(12)), scheduler, prompt_logprobs=1))
        step = scheduler.schedule()
        output = answer(scheduler, step)
        output.prompt_logprobs = [prompt_part(1, 9)]
        assert all_outputs(scheduler.update_from_output(step, output)) == {}
        step = scheduler.schedule()
        output = answer(scheduler, step)
        output.prompt_logprobs = [prompt_part(9, 12)]
        found = all_outputs(scheduler.update_from_output(step, output))["r"].new_prompt_logprobs_tensors
        assert found is not None
        assert found.logprob_token_ids.array[:, 0].tolist() == list(range(1, 12))
        assert found.selected_token_ranks.array.tolist() == list(range(1, 12))
        assert all_outputs(run_step(scheduler))["r"].new_prompt_logprobs_tensors is None

    def test_of_the_prompt_start_over_after_a_preemption(self) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=8)
        scheduler.add_request(make_request("r", list(range(12)), scheduler, prompt_logprobs=1))
        step = scheduler.schedule()
        output = answer(scheduler, step)
        output.prompt_logprobs = [prompt_part(1, 9)]
        scheduler.update_from_output(step, output)
        assert scheduler.reset_prefix_cache(reset_running=True)
        for first, end in ((1, 9), (9, 12)):
            step = scheduler.schedule()
            output = answer(scheduler, step)
            output.prompt_logprobs = [prompt_part(first, end)]
            outputs = all_outputs(scheduler.update_from_output(step, output))
        found = outputs["r"].new_prompt_logprobs_tensors
        assert found is not None and found.selected_token_ranks.array.tolist() == list(range(1, 12))

    def test_of_the_prompt_skip_reading_the_cache(self) -> None:
        scheduler = make_scheduler()
        prompt = list(range(40))
        scheduler.add_request(make_request("warm", prompt, scheduler, max_tokens=1))
        run_step(scheduler)
        scheduler.add_request(make_request("asks", prompt, scheduler, prompt_logprobs=0))
        step = scheduler.schedule()
        assert step.num_computed_tokens.tolist() == [0]
        scheduler.update_from_output(step, answer(scheduler, step))
        scheduler.add_request(
            make_request("reads", prompt, scheduler, prompt_logprobs=0, skip_reading_prefix_cache=False)
        )
        assert scheduler.schedule().num_computed_tokens.tolist() == [40, 32]

    def test_skipping_can_be_asked_for(self) -> None:
        scheduler = make_scheduler()
        prompt = list(range(40))
        scheduler.add_request(make_request("warm", prompt, scheduler, max_tokens=1))
        run_step(scheduler)
        scheduler.add_request(make_request("skips", prompt, scheduler, skip_reading_prefix_cache=True))
        assert scheduler.schedule().num_computed_tokens.tolist() == [0]


def prompt_part(first: int, end: int) -> PromptLogprobs:
    """Lines for the prompt tokens first .. end - 1 of row 0, with two columns."""
    tokens = np.arange(first, end, dtype=np.int32)
    both = np.stack((tokens, tokens), axis=1)
    return PromptLogprobs(0, both, -both.astype(np.float32), tokens)


class TestPrefixCache:
    def test_a_full_hit_computes_the_last_token_again(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", list(range(32)), scheduler, max_tokens=1))
        run_step(scheduler)
        scheduler.add_request(make_request("b", list(range(32)), scheduler))
        step = scheduler.schedule()
        assert step.num_computed_tokens.tolist() == [16] and step.num_scheduled_tokens.tolist() == [16]

    def test_a_hit_up_to_the_last_token_computes_one(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", list(range(32)), scheduler, max_tokens=1))
        run_step(scheduler)
        scheduler.add_request(make_request("b", [*range(32), 5], scheduler))
        assert scheduler.schedule().num_scheduled_tokens.tolist() == [1]

    def test_salts_and_adapters_do_not_hit_each_other(self) -> None:
        scheduler = make_scheduler(enable_lora=True, max_loras=4, max_num_batched_tokens=200)
        prompt = list(range(33))
        kinds: list[dict[str, Any]] = [
            {},
            {"cache_salt": "a"},
            {"cache_salt": "b"},
            {"lora": LoRARequest("l", 1, "/l")},
            {"lora": LoRARequest("l", 2, "/elsewhere")},
        ]
        for repeat, expected in enumerate((0, 32)):
            for i, kind in enumerate(kinds):
                scheduler.add_request(make_request(f"{repeat}-{i}", prompt, scheduler, max_tokens=1, **kind))
            step = scheduler.schedule()
            assert step.num_computed_tokens.tolist() == [expected] * len(kinds)
            scheduler.update_from_output(step, answer(scheduler, step))

    def test_reset_is_refused_while_in_use_and_works_after(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("a", list(range(40)), scheduler, max_tokens=2))
        run_step(scheduler)
        assert not scheduler.reset_prefix_cache()
        run_step(scheduler)
        assert scheduler.reset_prefix_cache()
        stats = scheduler.make_stats().prefix_cache_stats
        assert stats.reset
        scheduler.add_request(make_request("b", list(range(40)), scheduler))
        assert scheduler.schedule().num_computed_tokens.tolist() == [0]

    @pytest.mark.parametrize("is_async", [False, True])
    def test_reset_of_the_running_starts_them_over_in_order(self, is_async: bool) -> None:
        scheduler = make_scheduler(async_scheduling=is_async)
        for i in range(3):
            scheduler.add_request(make_request(f"r{i}", list(range(20)), scheduler, max_tokens=9))
        scheduler.add_request(make_request("new", [1], scheduler))
        run_step(scheduler)
        before = [request.request_id for request in scheduler.batch.requests]
        in_flight = scheduler.schedule()
        late = answer(scheduler, in_flight)
        assert scheduler.reset_prefix_cache(reset_running=True)
        assert scheduler.check() == []
        step = scheduler.schedule()
        assert [request.request_id for request in scheduler.batch.requests] == before
        assert sorted(step.preempted_slots.tolist()) == [0, 1, 2, 3]
        assert step.num_computed_tokens.tolist() == [0, 16, 16, 0]  # r1 and r2 share what r0 computes
        assert [request.token_ids.tolist()[-1] for request in step.new_requests] == [7, 7, 7, 7]
        # What was in flight is not delivered: it is sampled again.
        assert all_outputs(scheduler.update_from_output(in_flight, late)) == {}
        outputs = all_outputs(scheduler.update_from_output(step, answer(scheduler, step)))
        assert sorted(outputs) == ["new", "r0", "r1", "r2"]

    def test_a_victim_leaves_no_block_to_be_hit_that_it_did_not_compute(self) -> None:
        """By priority a request can be thrown out of the very step that was to fill its blocks; vLLM leaves
        those blocks to be hit.
        """
        scheduler = make_scheduler(
            num_blocks=7,
            block_size=4,
            scheduling_policy="priority",
            scheduler_reserve_full_isl=False,
            long_prefill_token_threshold=6,
        )
        victim = make_request("victim", list(range(20)), scheduler, priority=9)
        rival = make_request("rival", [100, 101, 102], scheduler, priority=10, arrival_time=1.0)
        scheduler.add_request(victim)
        scheduler.add_request(rival)
        run_step(scheduler)
        rival.priority = 0  # it came later, and so is behind the victim in the batch
        run_step(scheduler)
        assert scheduler.batch.row(0).computed == 12
        step = (
            scheduler.schedule()
        )  # the victim gets the last two blocks and fills one; then the rival needs one
        assert step.slots.tolist() == [1] and step.preempted_slots.tolist() == [0]
        assert len(scheduler.kv.pool.find(victim.block_hashes, 100)) == 3
        assert scheduler.check() == []


class TestWhoMayRun:
    def test_duplicate_ids_are_refused(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("r", [1], scheduler, max_tokens=1))
        with pytest.raises(RequestError, match="'r' is live") as caught:
            scheduler.add_request(make_request("r", [2], scheduler))
        assert caught.value.code == "duplicate_request_id" and not caught.value.retryable
        run_step(scheduler)
        scheduler.add_request(make_request("r", [2], scheduler))  # the first has ended

    def test_requests_beyond_the_queue_limit_are_refused(self) -> None:
        scheduler = make_scheduler(max_num_queued_reqs=2)
        scheduler.add_request(make_request("a", [1], scheduler, max_tokens=1))
        scheduler.add_request(make_request("b", [1], scheduler))
        with pytest.raises(RequestError, match="2 requests of at most 2") as caught:
            scheduler.add_request(make_request("c", [1], scheduler))
        assert caught.value.code == "queue_full" and caught.value.retryable
        run_step(scheduler)
        scheduler.add_request(make_request("c", [1], scheduler))

    def test_prompt_tokens_beyond_the_queue_limit_are_refused(self) -> None:
        """As in vLLM the request that crosses the limit is still let in."""
        scheduler = make_scheduler(max_num_queued_tokens=10)
        scheduler.add_request(make_request("a", [1] * 9, scheduler))
        scheduler.add_request(make_request("b", [1] * 9, scheduler))
        with pytest.raises(RequestError, match="18 prompt tokens are queued, the limit is 10") as caught:
            scheduler.add_request(make_request("c", [1], scheduler))
        assert caught.value.retryable
        scheduler.finish_requests(["b"], FinishReason.ABORT)
        scheduler.add_request(make_request("c", [1], scheduler))
        run_step(scheduler)
        assert scheduler.admission.queued_tokens == 0
        assert scheduler.check() == []

    def test_adapters_beyond_the_limit_are_overtaken(self) -> None:
        scheduler = make_scheduler(enable_lora=True, max_loras=1)
        for name, which in (("one", 1), ("two", 2), ("plain", 0), ("one again", 1)):
            lora = LoRARequest(f"l{which}", which, "/l") if which else None
            scheduler.add_request(make_request(name, [1], scheduler, lora=lora, max_tokens=2))
        run_step(scheduler)
        assert [r.request_id for r in scheduler.batch.requests] == ["one", "plain", "one again"]
        assert scheduler.make_stats().num_skipped_waiting_reqs == 1
        run_step(scheduler)
        run_step(scheduler)
        assert [r.request_id for r in scheduler.batch.requests] == ["two"]
        assert scheduler.make_stats().num_skipped_waiting_reqs == 0

    def test_a_paused_engine_admits_nobody_and_then_goes_on(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("runs", [1], scheduler, max_tokens=10))
        run_step(scheduler)
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        scheduler.add_request(make_request("waits", [1], scheduler))
        assert sorted(all_outputs(run_step(scheduler))) == ["runs"]
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        assert not scheduler.has_requests()
        scheduler.set_pause_state(PauseState.UNPAUSED)
        assert sorted(all_outputs(run_step(scheduler))) == ["runs", "waits"]

    def test_an_answer_to_another_step_is_refused(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("r", [1], scheduler))
        step = scheduler.schedule()
        output = answer(scheduler, step)
        with pytest.raises(RuntimeError, match="expected the outcome of step 1, got step 1, output 9"):
            scheduler.update_from_output(
                step, ModelRunnerOutput(9, output.sampled_token_ids, output.num_sampled)
            )
        with pytest.raises(ValueError, match="step 1 has 1 rows, but its outcome 0 tokens and 0 counts"):
            empty = np.empty((0, 1), np.int32)
            scheduler.update_from_output(step, ModelRunnerOutput(1, empty, empty[:, 0]))

    @pytest.mark.parametrize("is_chunk", [False, True])
    def test_a_worker_that_samples_the_wrong_rows_is_told(self, is_chunk: bool) -> None:
        scheduler = make_scheduler(max_num_batched_tokens=16)
        scheduler.add_request(make_request("fine", [1], scheduler))
        scheduler.add_request(make_request("odd", list(range(40 if is_chunk else 5)), scheduler))
        step = scheduler.schedule()
        output = answer(scheduler, step)
        output.num_sampled[1] = 1 if is_chunk else 0
        with pytest.raises(ValueError, match=r"outcome of step 1 is wrong for request odd: a row samples if"):
            scheduler.update_from_output(step, output)


class TestAbort:
    """At every state: blocks are free at once, the slot is announced once, nothing is delivered."""

    def test_while_waiting(self) -> None:
        scheduler = make_scheduler()
        scheduler.add_request(make_request("r", [1], scheduler))
        assert [
            r.request_id for r in scheduler.finish_requests(["r", "unknown", "r"], FinishReason.ABORT)
        ] == ["r"]
        assert scheduler.has_requests()  # the end is told with a step
        assert len(scheduler.schedule().finished_slots) == 0
        assert not scheduler.has_requests()

    @pytest.mark.parametrize("after_steps", [1, 2, 5])
    def test_while_running(self, after_steps: int) -> None:
        """In the middle of the prompt, at its end, and while decoding."""
        scheduler = make_scheduler(max_num_batched_tokens=16)
        request = make_request("r", list(range(24)), scheduler, max_tokens=50)
        scheduler.add_request(request)
        for _ in range(after_steps):
            run_step(scheduler)
        slot = request.slot
        scheduler.finish_requests(["r"], FinishReason.ABORT)
        assert request.finish_reason is FinishReason.ABORT and request.slot == -1
        assert scheduler.kv.pool.usage == 0.0 and scheduler.check() == []
        assert scheduler.schedule().finished_slots.tolist() == [slot]
        assert scheduler.schedule().finished_slots.tolist() == []

    @pytest.mark.parametrize("num_in_flight", [1, 2])
    def test_with_steps_in_flight(self, num_in_flight: int) -> None:
        scheduler = make_scheduler(async_scheduling=True)
        for name in ("a", "gone", "b"):
            scheduler.add_request(make_request(name, [1, 2, 3], scheduler))
        steps = []
        for _ in range(num_in_flight):
            step = scheduler.schedule()
            steps.append((step, answer(scheduler, step)))
        scheduler.finish_requests(["gone"], FinishReason.ABORT)
        assert scheduler.check() == []
        for step, output in steps:
            assert sorted(all_outputs(scheduler.update_from_output(step, output))) == ["a", "b"]
        assert scheduler.schedule().finished_slots.tolist() == [1]
        assert scheduler.check() == []

    def test_while_preempted_with_a_token_in_flight(self) -> None:
        scheduler = make_scheduler(async_scheduling=True)
        request = make_request("r", [1, 2, 3], scheduler)
        scheduler.add_request(request)
        step = scheduler.schedule()
        output = answer(scheduler, step)
        scheduler.reset_prefix_cache(reset_running=True)
        assert request.status is Status.PREEMPTED
        scheduler.finish_requests(["r"], FinishReason.ABORT)
        assert all_outputs(scheduler.update_from_output(step, output)) == {}
        assert scheduler.check() == []

    def test_the_same_id_again_while_the_old_ones_step_is_in_flight(self) -> None:
        """vLLM would give the old request's token to the new one."""
        scheduler = make_scheduler(async_scheduling=True)
        scheduler.add_request(make_request("r", [1, 2, 3], scheduler))
        step = scheduler.schedule()
        output = answer(scheduler, step)
        scheduler.finish_requests(["r"], FinishReason.ABORT)
        scheduler.add_request(make_request("r", [4, 5], scheduler))
        again = scheduler.schedule()
        assert all_outputs(scheduler.update_from_output(step, output)) == {}
        assert sorted(all_outputs(scheduler.update_from_output(again, answer(scheduler, again)))) == ["r"]

    def test_of_everything(self) -> None:
        scheduler = make_scheduler(max_num_seqs=2)
        for i in range(5):
            scheduler.add_request(make_request(f"r{i}", [1, 2, 3], scheduler))
        run_step(scheduler)
        assert len(scheduler.finish_requests(None, FinishReason.ABORT)) == 5
        assert scheduler.requests == {} and scheduler.check() == []
        assert sorted(scheduler.schedule().finished_slots.tolist()) == [0, 1]


class TestRestart:
    @pytest.mark.parametrize("is_async", [False, True])
    def test_new_workers_get_every_request_in_full_and_in_order(self, is_async: bool) -> None:
        scheduler = make_scheduler(async_scheduling=is_async, max_num_seqs=3)
        for i in range(4):
            scheduler.add_request(make_request(f"r{i}", [1, 2, i], scheduler))
        run_step(scheduler, 9)
        scheduler.schedule()  # lost with the workers
        scheduler.restart()
        assert scheduler.check() == []
        step = scheduler.schedule()
        assert [new.request_id for new in step.new_requests] == ["r0", "r1", "r2"]
        assert [new.token_ids.tolist() for new in step.new_requests] == [[1, 2, i, 9] for i in range(3)]
        assert len(step.finished_slots) == len(step.preempted_slots) == 0
        assert step.num_computed_tokens.tolist() == [0, 0, 0]
        outputs = all_outputs(scheduler.update_from_output(step, answer(scheduler, step)))
        assert sorted(outputs) == ["r0", "r1", "r2"]
