"""The engine in a thread: many askers, none of whom sees another's answer."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from megatron.core.config.flags.declare import ConfigError
from megatron.core.config.settings.inference import InferenceConfig
from megatron.core.tokenizers.build import NullTokenizer
from megatron.inference.beam import beam_search
from megatron.inference.engine import Engine
from megatron.inference.requests import GenerationEvent, GenerationReply, GenerationRequest
from megatron.inference.service import EngineService
from megatron.inference.service_thread import ServiceStoppedError
from tests.helpers import tiny
from tests.helpers.world import Worlds
from tests.unit.inference.serving import engine_of, greedy, network, prompts, slowly, stages_on

LONG = greedy((3, 1, 4), 60)


def test_many_threads_get_their_own_answers() -> None:
    model, texts, found = network(), prompts(24, longest=20), dict[int, list[int]]()
    with EngineService(engine_of(model, together=5, tokens=12, block=4)) as service:

        def ask(number: int) -> None:
            stream = service.submit(greedy(texts[number], 8))
            if number % 4 == 3:
                stream.cancel()
            found[number] = [token.id for event in stream for token in event.tokens]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(texts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert service.engine.metrics().blocks_used == 0
    for number, text in enumerate(texts):
        expected = slowly(model, text, 8)[0]
        assert found[number] == expected[: len(found[number])] and (number % 4 == 3 or len(found[number]) == 8)


def test_an_event_loop_hears_tokens_as_they_come() -> None:
    async def ask(service: EngineService) -> list[GenerationEvent]:
        loop, events = asyncio.get_running_loop(), asyncio.Queue[GenerationEvent]()
        service.submit(greedy((3, 1, 4), 6), lambda event: loop.call_soon_threadsafe(events.put_nowait, event))
        heard = [await asyncio.wait_for(events.get(), 60)]
        while heard[-1].reply is None:
            heard.append(await asyncio.wait_for(events.get(), 60))
        return heard

    with EngineService(engine_of(network())) as service:
        heard = asyncio.run(ask(service))
    assert [len(event.tokens) for event in heard] == [1] * 6


def test_a_reply_knows_how_long_it_took() -> None:
    with EngineService(engine_of(network())) as service:
        reply = service.submit(greedy((3, 1, 4), 6)).wait_for_reply()
    assert reply.first is not None and 0 <= reply.waited <= reply.first <= reply.total


def test_draining_finishes_what_is_there_and_takes_nothing_new() -> None:
    with EngineService(engine_of(network())) as service:
        stream = service.submit(LONG)
        assert service.drain(60) and stream.wait_for_reply().reason == "length"
        with pytest.raises(ServiceStoppedError, match="about to end"):
            service.submit(LONG)


def test_draining_gives_up_after_its_time_and_stopping_cancels() -> None:
    with EngineService(engine_of(network(), guesses=1, draft=network())) as service:
        streams = [service.submit(LONG) for _ in range(40)]
        assert not service.drain(0.0)
    assert {stream.wait_for_reply().reason for stream in streams} <= {"cancelled", "length"} and streams[
        -1
    ].wait_for_reply().reason == "cancelled"
    assert service.engine.metrics().blocks_used == 0


def test_a_bad_request_harms_only_its_asker() -> None:
    with EngineService(engine_of(network())) as service:
        stream = service.submit(greedy((3, 1, 4), 6))
        with pytest.raises(ConfigError):
            service.submit(greedy((999,), 6))
        assert stream.wait_for_reply().reason == "length" and service.failure_reason == ""


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failure_is_told_to_everyone_who_waits_and_to_everyone_who_comes() -> None:
    engine = engine_of(network(), together=1)

    def broken(*_: Any) -> None:
        raise RuntimeError("a rank is gone")

    with EngineService(engine) as service:
        events: list[GenerationEvent] = []

        def on_event(event: GenerationEvent) -> None:
            engine.runner.launch = broken  # type: ignore[method-assign]
            events.append(event)

        service.submit(LONG, on_event)
        waits = service.submit(LONG)
        assert waits.wait_for_reply().reason == "error" and "a rank is gone" in waits.wait_for_reply().problem
        while not service.failure_reason:
            time.sleep(0.001)
        with pytest.raises(ServiceStoppedError, match="a rank is gone"):
            service.submit(LONG)
    assert events[-1].reply is not None and events[-1].reply.reason == "error"


def test_beams_are_searched_beside_other_requests() -> None:
    with EngineService(engine_of(network(), block=4)) as service:
        other = service.submit(greedy((3, 1, 4), 40))
        beams = beam_search(service.submit_and_wait_all, (3, 1, 4), width=3, num_tokens=5, ends=())
        assert list(other.wait_for_reply().ids) == slowly(network(), (3, 1, 4), 40)[0]
    alone = beam_search(engine_of(network()).run, (3, 1, 4), width=3, num_tokens=5, ends=())
    assert [beam.ids for beam in beams] == [beam.ids for beam in alone]


def served(changes: dict[str, Any]) -> list[GenerationReply] | None:
    """A service over two ranks."""
    engine = Engine(stages_on(dist.get_world_size(), **changes), NullTokenizer(tiny.VOCABULARY), InferenceConfig())
    if not engine.mesh.world.is_first:
        engine.run_as_follower()
        return None
    with EngineService(engine) as service:
        streams = [service.submit(greedy(text, 8)) for text in prompts(6)]
        streams[1].cancel()
        time.sleep(0.05)
        return [stream.wait_for_reply() for stream in streams] + service.submit_and_wait_all(
            [GenerationRequest((3, 1), 4, seed=1)]
        )


def test_a_service_leads_the_other_ranks_and_lets_them_go(world: Worlds) -> None:
    replies, nothing = world(2).run(served, {"tensor_model_parallel_size": 2})
    assert nothing is None and len(replies) == 7
    for number, (text, reply) in enumerate(zip(prompts(6), replies, strict=False)):
        assert list(reply.ids) == slowly(network(), text, 8)[0][: len(reply.ids)] and (
            number == 1 or len(reply.ids) == 8
        )
