"""The HTTP client and the background loop: what is retried, what is not, and what the error says."""

import asyncio
import contextlib
import pickle
import sys

import pytest
from aiohttp import web
from rollout_wire import WireServer, free_port

from slime.config import Args
from slime.utils import http_utils
from slime.utils.async_utils import gather_or_cancel, get_async_loop, run
from slime.utils.http_utils import HttpError, get, num_engines, post
from slime.utils.misc import SingletonMeta, load_function

pytestmark = pytest.mark.timeout(120)
PAYLOAD = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2}}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(http_utils, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(http_utils, "LONGEST_PAUSE", 0.05)


def answer(status, body):
    return web.json_response(body, status=status)


def ask(server, **kwargs):
    async def main():
        async with server.serving():
            return await post(f"http://127.0.0.1:{server.port}/generate", PAYLOAD, **kwargs)

    return run(main())


def test_5xx_is_retried_until_it_works():
    server = WireServer(lambda n, _: answer(503, {"error": {"message": "no worker"}}) if n < 3 else None)
    assert ask(server)["output_ids"] == [12, 13]
    assert server.requests == [PAYLOAD] * 4


def test_5xx_for_good_is_an_error_with_the_servers_words():
    server = WireServer(lambda n, _: answer(500, {"error": {"message": "out of luck"}}))
    with pytest.raises(HttpError, match=r"gave up after 3 tries: .*HTTP 500: out of luck") as error:
        ask(server, max_retries=3)
    assert error.value.status == 500 and len(server.requests) == 3
    copy = pickle.loads(pickle.dumps(error.value))  # it travels through Ray
    assert str(copy) == str(error.value) and copy.status == 500


@pytest.mark.parametrize(
    "body, words",
    [
        ({"error": {"message": "input_ids cannot be empty."}}, "input_ids cannot be empty."),
        ({"error": "unknown field `weird`"}, "unknown field `weird`"),
        ({"message": "no"}, "no"),
    ],
)
def test_4xx_is_never_retried(body, words):
    server = WireServer(lambda n, _: answer(400, body))
    with pytest.raises(HttpError) as error:
        ask(server)
    assert len(server.requests) == 1 and error.value.status == 400
    assert str(error.value).endswith(f"HTTP 400: {words}")


@pytest.mark.parametrize("status", [408, 429])
def test_a_busy_server_is_asked_again(status):
    server = WireServer(lambda n, _: answer(status, {"error": "later"}) if n < 2 else None)
    assert ask(server)["output_ids"] == [12, 13] and len(server.requests) == 3


def test_waiting_for_a_connection_counts_for_no_timeout_and_only_at_the_busy_server(monkeypatch):
    monkeypatch.setattr(http_utils._settings, "concurrency", -62)  # two connections to one server

    async def main():
        slow, quick = WireServer(), WireServer()
        slow.token_seconds = 0.2
        async with slow.serving(), quick.serving():
            many = [post(f"http://127.0.0.1:{slow.port}/generate", PAYLOAD, timeout=1.0) for _ in range(12)]
            pending = asyncio.gather(*many)
            await asyncio.sleep(0.05)
            await post(f"http://127.0.0.1:{quick.port}/generate", PAYLOAD)
            assert not pending.done()
            return slow.most_in_flight, len(await pending), len(slow.requests)

    assert run(main()) == (2, 12, 12)  # 12 / 2 of 0.4 s each: the last one waited for 2 s


def test_refused_connections_are_retried_until_the_server_is_back():
    async def main():
        server, port = WireServer(), free_port()
        pending = asyncio.create_task(post(f"http://127.0.0.1:{port}/generate", PAYLOAD))
        await asyncio.sleep(0.05)
        async with server.serving(port):
            return await pending

    assert run(main())["output_ids"] == [12, 13]
    with pytest.raises(HttpError, match="gave up after 2 tries"):
        run(post(f"http://127.0.0.1:{free_port()}/generate", PAYLOAD, max_retries=2))


def test_a_connection_cut_in_the_middle_is_retried():
    async def main():
        connections = 0

        async def serve(reader, writer):
            nonlocal connections
            connections += 1
            await reader.readuntil(b"\r\n\r\n")
            body = b'{"ok": 1}'
            head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
            writer.write(head + (body[:3] if connections == 1 else body))
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await post(f"http://127.0.0.1:{port}/", {}), connections

    assert run(main()) == ({"ok": 1}, 2)


def test_a_server_that_hangs_is_an_error_after_the_timeout():
    server = WireServer()
    server.token_seconds = 30.0
    with pytest.raises(HttpError, match="no answer within 0.1 s, 2 times"):
        ask(server, timeout=0.1)


def test_get_and_text_answers():
    async def main():
        server = WireServer()
        async with server.serving():
            base = f"http://127.0.0.1:{server.port}"
            return await get(f"{base}/workers"), await post(f"{base}/abort_request", {})

    workers, text = run(main())
    assert workers["workers"][0]["is_healthy"] and text == ""


def test_run_returns_raises_and_refuses_to_wait_for_itself():
    async def fail():
        raise KeyError("x")

    async def nested():
        run(asyncio.sleep(0))

    assert run(asyncio.sleep(0, "value")) == "value"
    with pytest.raises(KeyError):
        run(fail())
    with pytest.raises(RuntimeError, match="use await"):
        run(nested())


def test_sys_exit_on_the_loop_is_an_error_and_the_loop_goes_on():
    async def leave():
        sys.exit(3)

    async def nested():
        await gather_or_cancel([leave(), asyncio.sleep(60)])

    other = asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05, "done"), get_async_loop().loop)
    for function in (leave, nested):
        with pytest.raises(RuntimeError, match=r"called sys.exit\(3\)"):
            run(function())
    assert other.result(10) == "done"


def test_gather_cancels_the_others_when_one_fails():
    ended = []

    async def long():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("long")

    async def fail():
        await asyncio.sleep(0)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run(gather_or_cancel([long(), fail(), long()]))
    assert ended == ["long", "long"]
    assert run(gather_or_cancel([asyncio.sleep(0.01, 1), asyncio.sleep(0, 2)])) == [1, 2]


def test_num_engines():
    assert num_engines(Args()) == 1
    assert num_engines(Args(rollout_num_gpus=8, rollout_num_gpus_per_engine=2)) == 4


def test_singletons_by_key():
    class Keyed(metaclass=SingletonMeta):
        def __init__(self, key, other=0):
            self.other = other

        @staticmethod
        def singleton_key(key, other=0):
            return key

    class Plain(metaclass=SingletonMeta):
        pass

    assert Keyed("a", 1) is Keyed("a", 2) is not Keyed("b") and Keyed("a").other == 1
    first = Plain()
    assert first is Plain()
    Plain.clear_instances()
    assert first is not Plain()


def test_load_function():
    assert load_function("contextlib.suppress") is contextlib.suppress
