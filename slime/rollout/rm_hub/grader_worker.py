"""Main of a grader process: receives (path, args, timeout) over an inherited pipe, answers "started", then the result.

A process of its own, because a grader may hang in C code that no signal or thread can stop: only a kill can.
"""

import faulthandler
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import Any

from slime.config.hooks import load_by_path

SUICIDE_GRACE = 5.0  # the parent kills at the deadline; should it be gone, the worker ends itself a bit later


def serve(connection: Connection) -> None:
    while True:
        try:
            path, args, timeout = connection.recv()
        except EOFError:  # the parent closed its end or died
            return
        _answer(connection, path, args, timeout)


def _answer(connection: Connection, path: str, args: tuple[Any, ...], timeout: float) -> None:
    try:
        function = load_by_path(path)
    except Exception:
        connection.send(("started", None))
        connection.send(("error", traceback.format_exc()))
        return
    connection.send(("started", None))  # imports can take seconds; the deadline is for the grading alone
    faulthandler.dump_traceback_later(timeout + SUICIDE_GRACE, exit=True)  # works while C code holds the GIL
    try:
        reply = ("ok", function(*args))
    except BaseException:
        reply = ("error", traceback.format_exc())
    finally:
        faulthandler.cancel_dump_traceback_later()
    try:
        connection.send(reply)
    except (TypeError, AttributeError, ValueError) as error:
        connection.send(("error", f"the grader's result cannot be sent back: {error}"))


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's; its end closes the pipe
    serve(Connection(int(sys.argv[1])))
