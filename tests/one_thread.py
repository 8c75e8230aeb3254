"""Threads, clocks, queues and event loops that are none: real code, one thing at a time, in an order
that comes from a seed.

Code that is written with `threading`, `time` and `concurrent.futures` runs as it is: `installed` puts
what is here in their place, in the modules that are to be tried. A thread is a greenlet then. It may be
left wherever it takes or gives back a lock, waits, or asks for `maybe_leave`; chance says who goes on.
Time passes when it is told to. So a seed is a whole life, the same each time.

A *process* is what may be killed: its threads stand still from then on, wherever they are, and nothing
of theirs is cleaned up.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextvars import Context
from functools import partial
from queue import Empty
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar
from unittest import mock

from greenlet import GreenletExit, getcurrent, greenlet

T = TypeVar("T")


class Process:
    """Threads that die together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_alive = True
        self.is_stopped = False  # for a while: its threads stand still, and its connections stay
        self.standing: list[Task] = []  # those that would go on


class Task:
    """One thread."""

    __slots__ = (
        "__weakref__",
        "done",
        "greenlet",
        "joining",
        "loop",
        "name",
        "process",
        "wait",
        "woken",
    )

    def __init__(self, name: str, process: Process) -> None:
        self.name = name
        self.process = process
        self.greenlet: Any = None
        self.loop: Loop | None = None  # which it runs
        self.wait = 0  # the number of what it waits for; 0 if it does not
        self.woken = False  # by somebody, and not by its time being over
        self.done = False
        self.joining: list[Task] = []

    def __repr__(self) -> str:
        return f"<{self.process.name}: {self.name}>"


class Turns:
    """Whose turn it is, and what time."""

    def __init__(self, chance: random.Random, *, restless: float = 0.3) -> None:
        """`restless`: how often a thread is left where it might be."""
        self.chance = chance
        self.restless = restless
        self.now = 1000.0
        self._calendars = [0.0]  # seconds ahead: somebody has put the calendar right, or wrong
        self.slices = 0
        self.failure: BaseException | None = None
        self.is_over = False
        self.current: Task | None = None
        self.here = Process("here")
        self.threading = _threading(self)
        self.time = _time(self)
        self._hub = getcurrent()
        self._tasks: list[Task] = []
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count(1)

    # For whoever drives it

    def start(self, work: Callable[[], object], name: str, process: Process | None = None) -> Task:
        """A thread; of the same process as whoever starts it, where none is named."""
        if process is None:
            process = self.current.process if self.current else self.here
        task = Task(name, process)

        def run() -> None:
            try:
                work()
            except GreenletExit:
                pass
            except BaseException as error:  # noqa: BLE001 - it is raised where this is driven from
                self.fail(error)
            task.done = True
            for one in task.joining:
                self.wake(one)

        task.greenlet = greenlet(run, parent=self._hub)
        self._tasks.append(task)
        self._ready.append(task)
        return task

    def fail(self, error: BaseException) -> None:
        if not self.is_over:
            self.failure = self.failure or error

    def go_on(self) -> bool:
        """Let one thread go on until it is left; whether there was one. Raises what one has raised."""
        while self._ready:
            last = len(self._ready) - 1
            at = int(self.chance.random() * (last + 1))
            self._ready[at], self._ready[last] = self._ready[last], self._ready[at]
            task = self._ready.pop()
            if task.process.is_alive and task.process.is_stopped:
                task.process.standing.append(task)
            elif task.process.is_alive:
                self._switch_to(task)
                self.pass_time(0.0002)
                return True
        return False

    def stop(self, process: Process) -> None:
        """As SIGSTOP does; time goes on for all others, and so do the timers of this one."""
        process.is_stopped = True

    def let_go_on(self, process: Process) -> None:
        process.is_stopped = False
        self._ready += process.standing
        process.standing.clear()

    def calendar(self) -> float:
        return self.now + 1.7e9 + 0.3 + self._calendars[-1]

    def put_calendar(self, seconds: float) -> None:
        self._calendars.append(self._calendars[-1] + seconds)

    @property
    def calendar_spread(self) -> float:
        """How far apart it has been, at the same time."""
        return max(self._calendars) - min(self._calendars)

    def _switch_to(self, task: Task) -> None:
        self.slices += 1
        self.current = task
        asyncio._set_running_loop(task.loop)
        try:
            task.greenlet.switch()
        finally:
            asyncio._set_running_loop(None)
            self.current = None
        if task.done and len(self._tasks) > 64 and self.slices % 64 == 0:
            self._tasks = [one for one in self._tasks if not one.done]
        if self.failure:
            raise self.failure

    def pass_time(self, seconds: float) -> None:
        """Whoever has waited long enough is ready to go on."""
        self.now += seconds
        while self._timers and self._timers[0][0] <= self.now:
            _, number, task = heapq.heappop(self._timers)
            if task.wait == number:
                self._make_ready(task, woken=False)

    def pass_time_until_something_is_due(self, seconds_max: float) -> None:
        """Nobody is ready: until somebody is, at most so long."""
        while self._timers and self._timers[0][2].wait != self._timers[0][1]:
            heapq.heappop(self._timers)
        seconds = self._timers[0][0] - self.now if self._timers else seconds_max
        self.pass_time(min(max(seconds, 0.0), seconds_max))

    def end(self) -> None:
        """Nobody goes on any more. What they hold is let go of."""
        self.is_over = True
        for task in self._tasks:
            if task.greenlet:
                self.current = task
                with contextlib.suppress(Exception):
                    task.greenlet.throw(GreenletExit)
        self.current = None

    # For those whose turn it is

    def leave(self) -> None:
        """Others may go on, and this one later."""
        if self.current and not self.is_over:
            self._ready.append(self.current)
            self._hub.switch()
            self._check()

    def maybe_leave(self) -> None:
        if self.chance.random() < self.restless:
            self.leave()

    def wait(self, waiting: list[Task] | None = None, seconds: float | None = None) -> bool:
        """Until `wake`; False if so much time has passed first."""
        self._check()
        task = self.current
        if task is None:
            raise RuntimeError("nobody is there who could wait")
        task.wait = next(self._numbers)
        if seconds is not None:
            heapq.heappush(self._timers, (self.now + max(0.0, seconds), task.wait, task))
        if waiting is not None:
            waiting.append(task)
        self._hub.switch()
        if waiting is not None and task in waiting:
            waiting.remove(task)
        self._check()
        return task.woken

    def wake(self, task: Task) -> None:
        if task.wait:
            self._make_ready(task, woken=True)

    def wake_one(self, waiting: list[Task]) -> None:
        if waiting:
            self.wake(waiting.pop(int(self.chance.random() * len(waiting))))

    def wake_all(self, waiting: list[Task]) -> None:
        while waiting:
            self.wake(waiting.pop())

    def _make_ready(self, task: Task, *, woken: bool) -> None:
        task.wait, task.woken = 0, woken
        self._ready.append(task)

    def _check(self) -> None:
        if self.is_over:
            raise GreenletExit


# What stands in for `threading`


class Lock:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_taken = False
        self._waiting: list[Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001
        turns = self._turns
        turns.maybe_leave()
        while self._is_taken and not turns.is_over:
            if not blocking:
                return False
            if not turns.wait(self._waiting, None if timeout < 0 else timeout):
                return False
        self._is_taken = True
        return True

    def release(self) -> None:
        self._is_taken = False
        self._turns.wake_one(self._waiting)
        self._turns.maybe_leave()

    def locked(self) -> bool:
        return self._is_taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    """May be taken several times by who has it."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(turns)
        self._owner: Task | None = None
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001
        me = self._turns.current
        if (self._owner is not me or not self._times) and not super().acquire(blocking, timeout):
            return False
        self._owner = me
        self._times += 1
        return True

    def release(self) -> None:
        self._times -= 1
        if not self._times:
            self._owner = None
            super().release()

    def let_go(self) -> int:
        """Altogether; so often it was taken."""
        times, self._times = self._times, 1
        self.release()
        return times

    def take_again(self, times: int) -> None:
        self.acquire()
        self._times = times


class _Ticket:
    """One wait for a condition. It counts from before the lock is given back, where others may go on."""

    def __init__(self, task: Task | None) -> None:
        self.task = task
        self.is_waiting = False
        self.is_notified = False


class Condition:
    def __init__(self, turns: Turns, lock: Lock | None = None) -> None:
        self._turns = turns
        self._lock = lock or RLock(turns)
        self._tickets: list[_Ticket] = []

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        lock, ticket = self._lock, _Ticket(self._turns.current)
        self._tickets.append(ticket)
        times = 0
        if isinstance(lock, RLock):
            times = lock.let_go()
        else:
            lock.release()
        try:
            if not ticket.is_notified:
                ticket.is_waiting = True
                self._turns.wait(None, timeout)
        finally:
            if ticket in self._tickets:
                self._tickets.remove(ticket)
            if isinstance(lock, RLock):
                lock.take_again(times)
            else:
                lock.acquire()
        return ticket.is_notified

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        until = None if timeout is None else self._turns.now + timeout
        while not predicate():
            left = None if until is None else until - self._turns.now
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify(self, n: int = 1) -> None:
        for ticket in self._tickets[:n]:
            self._tickets.remove(ticket)
            ticket.is_notified = True
            if ticket.is_waiting and ticket.task:
                self._turns.wake(ticket.task)

    def notify_all(self) -> None:
        self.notify(len(self._tickets))


class Event:
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._is_set = False
        self._waiting: list[Task] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._turns.wake_all(self._waiting)

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        self._turns.maybe_leave()
        return self._is_set or self._turns.wait(self._waiting, timeout) or self._is_set


class Thread:
    def __init__(
        self,
        turns: Turns,
        *,
        target: Callable[..., object],
        args: Sequence[object] = (),
        name: str = "a thread",
        daemon: bool | None = None,  # noqa: ARG002 - all of them are
    ) -> None:
        self._turns = turns
        self._work = partial(target, *args)
        self._name = name
        self._task: Task | None = None

    def start(self) -> None:
        self._task = self._turns.start(self._work, self._name)

    def join(self, timeout: float | None = None) -> None:
        task = self._task
        if task and not task.done and not self._turns.is_over:
            self._turns.wait(task.joining, timeout)

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.done


class Local:
    """Another for each thread."""

    def __init__(self, turns: Turns) -> None:
        self.__dict__["_turns"] = turns
        self.__dict__["_of"] = {}

    def __getattr__(self, name: str) -> Any:
        try:
            return self._of[self._turns.current, name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self._of[self._turns.current, name] = value


class SimpleQueue(Generic[T]):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._items: deque[T] = deque()
        self._waiting: list[Task] = []

    def put(self, item: T) -> None:
        self._items.append(item)
        self._turns.wake_one(self._waiting)

    def get(self) -> T:
        self._turns.maybe_leave()
        while not self._items:
            self._turns.wait(self._waiting)
        return self._items.popleft()

    def get_nowait(self) -> T:
        if not self._items:
            raise Empty
        return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


def _threading(turns: Turns) -> SimpleNamespace:
    return SimpleNamespace(
        Lock=partial(Lock, turns),
        RLock=partial(RLock, turns),
        Condition=partial(Condition, turns),
        Event=partial(Event, turns),
        Thread=partial(Thread, turns),
        local=partial(Local, turns),
        get_ident=lambda: id(turns.current),
        main_thread=lambda: SimpleNamespace(is_alive=lambda: True),
    )


# What stands in for `time`


def _time(turns: Turns) -> SimpleNamespace:
    return SimpleNamespace(
        monotonic=lambda: turns.now,
        perf_counter=lambda: turns.now,
        time=turns.calendar,
        sleep=lambda seconds: turns.wait(None, seconds),
        thread_time=lambda: 0.0,
        pthread_getcpuclockid=lambda _: 0,
        clock_gettime=lambda _: 0.0,
    )


# What stands in for `concurrent.futures`


class Future(Generic[T]):
    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._waiting: list[Task] = []
        self._result: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Future[T]], object]] = []
        self.is_done = False

    def add_done_callback(self, callback: Callable[[Future[T]], object]) -> None:
        if self.is_done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def run(self, work: Callable[[], T]) -> None:
        try:
            self._result = work()
        except GreenletExit:
            raise
        except BaseException as error:  # noqa: BLE001 - for whoever asks for the result
            self._error = error
        self.is_done = True
        self._turns.wake_all(self._waiting)
        for callback in self._callbacks:
            callback(self)

    def wait(self) -> None:
        while not self.is_done:
            self._turns.wait(self._waiting)

    def result(self) -> T:
        self.wait()
        if self._error:
            raise self._error
        return self._result  # type: ignore[return-value]


class Pool:
    """So many threads and no more: what comes to wait for itself in here waits for ever."""

    def __init__(self, turns: Turns, max_workers: int, thread_name_prefix: str = "pool") -> None:
        self._turns = turns
        self._max = max_workers
        self._name = thread_name_prefix
        self._work: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._workers: list[Task] = []

    def submit(self, work: Callable[..., T], *args: Any) -> Future[T]:
        future = Future[T](self._turns)
        self._work.append((future, partial(work, *args)))
        self._workers = [worker for worker in self._workers if not worker.done]
        if len(self._workers) < self._max:
            self._workers.append(self._turns.start(self._run, self._name))
        return future

    def _run(self) -> None:
        while self._work:
            future, work = self._work.popleft()
            future.run(work)

    def map(self, work: Callable[..., T], *items: Iterable[Any]) -> Iterator[T]:
        futures = [self.submit(work, *of) for of in zip(*items, strict=False)]
        return iter([future.result() for future in futures])

    def shutdown(self, *, cancel_futures: bool = False) -> None:
        if cancel_futures:
            self._work.clear()
        for worker in self._workers:
            while not worker.done and not self._turns.is_over:
                self._turns.wait(worker.joining)


def wait(futures: Iterable[Future[Any]]) -> None:
    for future in list(futures):
        future.wait()


# What stands in for an event loop's thread


class Loop(asyncio.AbstractEventLoop):
    """As much of an event loop as pure coroutines want, with executors that are threads of ours."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self._due: deque[asyncio.Handle] = deque()
        self._waiting: list[Task] = []

    def start(self, process: Process) -> None:
        self._turns.start(self._run, "event loop", process).loop = self

    def _run(self) -> None:
        while True:
            while not self._due:
                self._turns.wait(self._waiting)
            handle = self._due.popleft()
            if not handle.cancelled():
                handle._run()
            self._turns.maybe_leave()

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._due.append(handle)
        self._turns.wake_all(self._waiting)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(self.time() + delay, callback, args, self, context)

        def ring() -> None:
            self._turns.wait(None, delay)
            if not handle.cancelled():
                self._due.append(handle)
                self._turns.wake_all(self._waiting)

        self._turns.start(ring, "timer")
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is found out when it is due."""

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T], **more: Any) -> asyncio.Task[T]:  # type: ignore[override]
        return asyncio.Task(coro, loop=self, **more)

    def run_in_executor(  # type: ignore[override]
        self,
        executor: object,  # noqa: ARG002 - as many threads as are wanted
        func: Callable[..., T],
        *args: Any,
    ) -> asyncio.Future[T]:
        answer = self.create_future()
        future = Future[T](self._turns)

        def work() -> None:
            future.run(partial(func, *args))
            self.call_soon(tell)

        def tell() -> None:
            if answer.cancelled():
                return
            try:
                answer.set_result(future.result())
            except Exception as error:  # noqa: BLE001 - for whoever waits for the answer
                answer.set_exception(error)

        self._turns.start(work, "executor")
        return answer

    def time(self) -> float:
        return self._turns.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._turns.fail(error if isinstance(error, BaseException) else RuntimeError(str(context)))


# Putting all of this in its place


class _Alarm(logging.Handler):
    """Where an error is caught and logged, so that a thread can go on, it is none the less an error."""

    def __init__(self, turns: Turns) -> None:
        super().__init__(logging.ERROR)
        self._turns = turns

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        self._turns.fail(error or RuntimeError(record.getMessage()))


@contextlib.contextmanager
def installed(turns: Turns, modules: Sequence[ModuleType], loggers: Sequence[str]) -> Iterator[None]:
    """In these modules, and so that errors that are logged there are failures."""
    stand_ins = {
        "threading": turns.threading,
        "time": turns.time,
        "SimpleQueue": partial(SimpleQueue, turns),
        "ThreadPoolExecutor": partial(Pool, turns),
        "wait": wait,
    }
    alarm = _Alarm(turns)
    with contextlib.ExitStack() as undo:
        for module in modules:
            for name, stand_in in stand_ins.items():
                if hasattr(module, name):
                    undo.enter_context(mock.patch.object(module, name, stand_in))
        for logger in map(logging.getLogger, loggers):
            undo.callback(setattr, logger, "propagate", logger.propagate)
            undo.callback(logger.setLevel, logger.level)
            undo.callback(logger.removeHandler, alarm)
            logger.addHandler(alarm)
            logger.setLevel(logging.ERROR)
            logger.propagate = False
        try:
            yield
        finally:
            turns.end()
