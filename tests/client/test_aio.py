# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest
from fake_triton import Call, FakeTriton, refuse

from cedar_client import AsyncClient, CedarError, ConnectionLost, InvalidArgument, ServerError, StallTimeout, Unavailable


def run(server: FakeTriton, body: Callable[[AsyncClient], Awaitable[Any]], **options: Any) -> Any:
    """``body`` in a loop of its own, with a client made outside of it."""
    client = AsyncClient(server.url, **options)

    async def main() -> Any:
        async with client, asyncio.timeout(30):
            return await body(client)

    return asyncio.run(main())


async def arrived(server: FakeTriton) -> Call:
    return await asyncio.to_thread(server.wait_for_call)


async def gone(call: Call) -> bool:
    return await asyncio.to_thread(call.gone.wait, 5)


@pytest.mark.parametrize("prompt", ["two_words", "flag_apart"])
def test_stream_ends_with_either_convention_of_the_final_flag(server: FakeTriton, prompt: str) -> None:
    async def body(client: AsyncClient) -> list[tuple[str, str | None]]:
        return [(delta.text, delta.finish_reason) async for delta in client.generate(prompt)]

    assert run(server, body) == [("Hello", None), (" world", "stop")]


def test_whole_result_joins_its_deltas(server: FakeTriton) -> None:
    result = run(server, lambda client: client.complete("two_words", max_tokens=3, request_key="mine"))
    assert (result.key, result.text, result.num_output_tokens) == ("mine", "Hello world", 3)
    assert server.calls[0].parameters == {"max_tokens": 3, "request_key": "mine"}


def test_several_prompts_in_one_request_are_refused_before_it_is_sent(server: FakeTriton) -> None:
    with pytest.raises(InvalidArgument, match=r"prompt: is a list; .*asyncio\.gather"):
        run(server, lambda client: client.complete(["a", "b"]))


def test_chat_sends_only_what_was_given(server: FakeTriton) -> None:
    result = run(server, lambda client: client.chat([{"role": "user", "content": "a"}], thinking=False).complete())
    assert result.text == '{"messages": [{"role": "user", "content": "a"}], "thinking": false}'


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("in ensemble 'cedar', INVALID_ARGUMENT: x", InvalidArgument),
        ("in ensemble 'cedar', UNAVAILABLE: x", Unavailable),
        ("INTERNAL: x", ServerError),
    ],
)
def test_server_error_becomes_the_exception_of_its_code(server: FakeTriton, message: str, kind: type[CedarError]) -> None:
    server.scripts["bad"] = refuse(message)
    with pytest.raises(kind) as caught:
        run(server, lambda client: client.complete("bad", request_key="k"))
    assert type(caught.value) is kind
    assert caught.value.key == "k"


@pytest.mark.parametrize(
    ("prompt", "kind", "message"),
    [
        ("broken", ConnectionLost, "Socket closed"),
        ("cancelled_by_server", ConnectionLost, "by an administrator"),
        ("unfinished", ServerError, "without a finish_reason"),
        ("foreign", ServerError, "the response is not Cedar's"),
    ],
)
def test_stream_that_breaks_off_raises_instead_of_ending(
    server: FakeTriton, prompt: str, kind: type[CedarError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        run(server, lambda client: client.complete(prompt))


def test_no_server_is_a_lost_connection_and_not_a_hang(server: FakeTriton) -> None:
    server.stop()

    async def body(client: AsyncClient) -> None:
        with pytest.raises(ConnectionLost):
            await client.complete("two_words")
        assert await client.ready() is False

    run(server, body)


@pytest.mark.parametrize("how", ["close", "with", "aclosing", "drop", "task"])
def test_stream_that_is_left_cancels_the_request_at_once(server: FakeTriton, how: str) -> None:
    async def body(client: AsyncClient) -> float:
        stream = client.generate("endless")
        if how == "close":
            await anext(stream)
            stream.close()
            stream.close()
            assert [delta async for delta in stream] == []
        elif how == "with":
            async with stream:
                await anext(stream)
        elif how == "aclosing":
            async with aclosing(stream):
                await anext(stream)
        elif how == "drop":
            await anext(stream)
            del stream
            gc.collect()
        else:
            task = asyncio.create_task(stream.complete())
            await arrived(server)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        start = time.monotonic()
        assert await gone(await arrived(server))
        return time.monotonic() - start

    assert run(server, body) < 5


def test_close_from_another_task_ends_a_blocked_read(server: FakeTriton) -> None:
    async def body(client: AsyncClient) -> None:
        async def read() -> list[Any]:
            return [delta async for delta in stream]

        stream = client.generate("mute")
        task = asyncio.create_task(read())
        call = await arrived(server)
        stream.close()
        assert await task == []
        assert await gone(call)

    run(server, body)


def test_silence_is_bounded_and_cancels_the_request(server: FakeTriton) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.generate("silent", request_key="k")
        assert (await anext(stream)).text == "Hello"
        with pytest.raises(StallTimeout, match=r"request k: nothing came for 0\.2 s"):
            await anext(stream)
        assert await gone(await arrived(server))

    run(server, body, stall_timeout=0.2)


def test_many_streams_share_one_client_without_mixing(server: FakeTriton) -> None:
    async def body(client: AsyncClient) -> list[bool]:
        async def one(number: int) -> bool:
            ids = list(range(number, number + 50))
            return (await client.complete(input_ids=ids)).text == str(ids)

        return await asyncio.gather(*map(one, range(200)))

    assert all(run(server, body))


def test_cancel_by_key_and_readiness(server: FakeTriton) -> None:
    async def body(client: AsyncClient) -> list[bool]:
        answers = [await client.cancel("live"), await client.cancel("gone"), await client.ready()]
        server.not_ready.add("decoder_generate")
        return [*answers, await client.ready()]

    assert run(server, body) == [True, False, True, False]


def test_closed_client_ends_its_streams(server: FakeTriton) -> None:
    async def body(client: AsyncClient) -> None:
        stream = client.generate("mute")
        task = asyncio.create_task(stream.complete())
        call = await arrived(server)
        await client.close()
        with pytest.raises(ConnectionLost):
            await task
        assert await gone(call)

    run(server, body)
