"""The HTTP client of rollouts and rewards: one connection pool per event loop, timeouts, retries that make sense."""

import asyncio
import atexit
import dataclasses
import logging
import random
import weakref
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import orjson

logger = logging.getLogger(__name__)

# Seconds between tries: 0.25, 0.4, 0.64, ... up to 10. 60 tries last about 9 minutes, longer than an engine's restart.
FIRST_PAUSE, PAUSE_GROWTH, LONGEST_PAUSE = 0.25, 1.6, 10.0
# A server that hangs is not helped by more of the same: one second chance, then the error.
MAX_TIMEOUTS = 2
TRY_LATER = (408, 429)  # the 4xx that say so: too slow, too many requests


class HttpError(RuntimeError):
    """A request that failed for good. status: the HTTP status, or None when no answer came."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.status)


@dataclasses.dataclass
class ClientSettings:
    """request_timeout: seconds for one try. connect_timeout: seconds until connected. concurrency: requests at a time
    to one server, without some spare ones."""

    request_timeout: float = 1800.0
    connect_timeout: float = 30.0
    concurrency: int = 4096


_settings = ClientSettings()
_sessions: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, aiohttp.ClientSession]" = weakref.WeakKeyDictionary()
_slots: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]]"
_slots = weakref.WeakKeyDictionary()


def init_http_client(args: Any) -> None:
    """Takes over timeout and concurrency from the flags; sessions made later use them."""
    _settings.request_timeout = float(args.rollout_request_timeout)
    _settings.concurrency = max(64, args.sglang_server_concurrency * num_engines(args))


def num_engines(args: Any) -> int:
    """Engines that serve this run."""
    return max(1, (args.rollout_num_gpus or 1) // args.rollout_num_gpus_per_engine)


async def post(
    url: str,
    payload: Any,
    max_retries: int = 60,
    headers: dict[str, str] | None = None,
    *,
    timeout: float | None = None,
) -> Any:
    """POSTs `payload` as JSON and returns the parsed answer (text where it is no JSON).

    Tried up to `max_retries` times while the server is away or busy: refused or broken connections, 5xx, 408 and 429,
    with growing pauses. Other 4xx are our mistake and never retried. timeout: seconds per try, default
    --rollout-request-timeout. Raises HttpError with the server's own message.
    """
    return await _request("POST", url, orjson.dumps(payload), max_retries, headers, timeout)


async def get(
    url: str, max_retries: int = 60, headers: dict[str, str] | None = None, *, timeout: float | None = None
) -> Any:
    """GETs and returns the parsed answer; retries and errors as `post`."""
    return await _request("GET", url, None, max_retries, headers, timeout)


async def _request(
    method: str, url: str, body: bytes | None, max_retries: int, headers: dict[str, str] | None, timeout: float | None
) -> Any:
    seconds = _settings.request_timeout if timeout is None else timeout
    pause, timeouts = FIRST_PAUSE, 0
    for attempt in range(1, max(1, max_retries) + 1):
        try:
            return await _try_once(method, url, body, headers, seconds)
        except HttpError as error:
            if error.status is not None and error.status < 500 and error.status not in TRY_LATER:
                raise
            failure: Exception = error
        except TimeoutError as error:
            timeouts += 1
            if timeouts >= MAX_TIMEOUTS:
                raise HttpError(
                    f"{method} {url}: no answer within {seconds:g} s, {timeouts} times; is the server stuck, "
                    "or does it need a longer --rollout-request-timeout?"
                ) from error
            failure = error
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError) as error:
            failure = error
        if attempt >= max_retries:
            break
        if attempt == 1 or attempt % 10 == 0:
            logger.warning("%s %s failed (try %d of %d): %s", method, url, attempt, max_retries, _describe(failure))
        await asyncio.sleep(pause * _jitter.uniform(0.75, 1.25))
        pause = min(pause * PAUSE_GROWTH, LONGEST_PAUSE)
    status = failure.status if isinstance(failure, HttpError) else None
    raise HttpError(f"{method} {url}: gave up after {attempt} tries: {_describe(failure)}", status) from failure


async def _try_once(method: str, url: str, body: bytes | None, headers: dict[str, str] | None, seconds: float) -> Any:
    all_headers = {"Content-Type": "application/json", **(headers or {})} if body is not None else headers
    limits = aiohttp.ClientTimeout(total=seconds, sock_connect=min(seconds, _settings.connect_timeout))
    async with (
        _slot(url),
        _session().request(method, url, data=body, headers=all_headers, timeout=limits) as response,
    ):
        content = await response.read()
        if response.status >= 400:
            raise HttpError(f"{method} {url}: HTTP {response.status}: {_message(content)}", response.status)
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _slot(url: str) -> asyncio.Semaphore:
    """Bounds the connections to one server. Waiting here counts for no timeout, and requests that pile up before a slow
    reward server leave those to the engines alone: a connection pool's own limit would do neither."""
    slots = _slots.setdefault(asyncio.get_running_loop(), {})
    return slots.setdefault(urlsplit(url).netloc, asyncio.Semaphore(_settings.concurrency + 64))


def _session() -> aiohttp.ClientSession:
    loop = asyncio.get_running_loop()
    session = _sessions.get(loop)
    if session is None or session.closed:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=30)  # `_slot` is the limit
        session = _sessions[loop] = aiohttp.ClientSession(connector=connector)
        atexit.register(_close_at_exit, weakref.ref(session), weakref.ref(loop))
    return session


def _close_at_exit(session_ref: Any, loop_ref: Any) -> None:
    session, loop = session_ref(), loop_ref()
    if session is not None and loop is not None and not session.closed and loop.is_running():
        try:
            asyncio.run_coroutine_threadsafe(session.close(), loop).result(2)
        except Exception:  # the process ends anyway; a late warning helps nobody
            logger.debug("closing the HTTP client failed", exc_info=True)


_jitter = random.Random()  # its own generator: pauses must not move the run's seeded ones


def _message(content: bytes, limit: int = 2000) -> str:
    """The server's own words: `error.message` or `error` of a JSON answer, else its text."""
    try:
        data = orjson.loads(content)
        error = data.get("error", data.get("message", data)) if isinstance(data, dict) else data
        text = error.get("message", str(error)) if isinstance(error, dict) else str(error)
    except orjson.JSONDecodeError:
        text = content.decode(errors="replace")
    return text.strip()[:limit] or "(empty answer)"


def _describe(error: BaseException) -> str:
    return str(error) if isinstance(error, HttpError) else f"{type(error).__name__}: {error}".rstrip(": ")
