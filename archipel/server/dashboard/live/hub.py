"""Open pages that are kept up to date: their streams of server-sent events, and one thread that looks for news.

An open stream keeps its thread, and nothing else: no connection of the database, and none of the places that bound how
many requests are worked on at once. So each web process has as many threads more as it keeps pages up to date
(`live_pages`), and open pages take nothing from devices. One thread for all of them asks the database what changed,
only while somebody watches; it makes what a page shows once for all who watch the same, and wakes these alone.

That thread also asks whether each viewer may still look: before every event, and every RECHECK_SECONDS. A stream whose
viewer has not been found to be allowed for UNCHECKED_SECONDS ends, whatever the reason.
"""

from __future__ import annotations

import logging
import select
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from sqlalchemy.exc import SQLAlchemyError

from archipel.errors import RefusalError
from archipel.server.callers import Identity
from archipel.server.http.problems import refuse
from archipel.server.http.request_limits import Slots

LOOK_SECONDS = 0.5
"""How often the process looks for news."""
RENEW_SECONDS = 2.0
"""A page of something that still goes on is made anew this often, for what no look finds, such as who waits."""
KEEP_ALIVE_SECONDS = 15.0
"""After so long without news a comment is sent, for proxies, and to find out that a reader has gone."""
RECHECK_SECONDS = 5.0
UNCHECKED_SECONDS = 15.0
LONGEST_SECONDS = 600.0
"""A stream ends after this time, and the browser opens another one, which counts as a use of its session."""
OF_ONE_PERSON = 16
"""So many streams one token or person has at the same time, in each web process."""
MOST_MADE = 20
"""So many pages are made anew in one look at most; the others come in the next one."""
OVER = b"event: over\ndata: %s\n\n"
_GONE = getattr(select, "POLLRDHUP", 0) | select.POLLHUP | select.POLLERR | select.POLLNVAL
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Viewer:
    """Who watches: `session` is the digest of the session that must go on, `sees` equal for all that see the same."""

    identity: Identity
    session: bytes
    sees: str


@dataclass(frozen=True)
class Shown:
    """What a page shows, as `parts` of (version, HTML): a part's version is another one when it shows something else.
    `lively`: it may change by itself."""

    parts: tuple[tuple[str, str], ...]
    lively: bool

    @property
    def version(self) -> str:
        """The versions of all parts."""
        return ".".join(version for version, _ in self.parts)

    def since(self, seen: str) -> str:
        """The HTML of the parts that a page with the version `seen` does not show."""
        known = seen.split(".")
        return "\n".join(html for version, html in self.parts if version not in known)


@dataclass(eq=False)
class _Stream:
    viewer: Viewer
    descriptor: int | None
    checked: float
    over: str = ""
    gone: bool = False


@dataclass(eq=False)
class _Topic:
    """A task, as those see it who see the same of it."""

    task_id: str
    news: threading.Condition
    streams: set[_Stream] = field(default_factory=set)
    shown: Shown | None = None
    made: float = 0.0
    stamp: object = None


class LivePages:
    """The streams of one web process: at most `most`.

    Arguments:
        most: The setting `live_pages`.
        make: What a task's page shows to a viewer. Raises RefusalError where they may not look, SQLAlchemyError.
        alive: Which of these sessions go on. Raises SQLAlchemyError.
        stamps: Something for each task that is another one after each change (changes.read_stamps).
    """

    def __init__(
        self,
        *,
        most: int,
        make: Callable[[str, Viewer], Shown],
        alive: Callable[[Collection[bytes]], set[bytes]],
        stamps: Callable[[Collection[str]], Mapping[str, object]],
    ) -> None:
        self._make, self._alive, self._stamps = make, alive, stamps
        self._all, self._own = Slots(most), Slots(min(most, OF_ONE_PERSON))
        self._most = most
        self._lock = threading.Lock()
        self._topics: dict[tuple[str, str], _Topic] = {}
        self._looking = False
        self._closed = threading.Event()

    def __len__(self) -> int:
        return sum(len(topic.streams) for topic in self._topics.values())

    def open(self, task_id: str, viewer: Viewer, *, seen: str, descriptor: int | None) -> Iterator[bytes]:
        """The events of a task for a viewer who was just found to be allowed, as parts of a response's body.

        Arguments:
            seen: The version that the page shows already.
            descriptor: Of the connection, to find out that the reader has gone; None: not known.

        Raises ApiError 503 or 429 where too many pages are kept up to date, and as `make`.
        """
        leave = self._enter(viewer)
        try:
            topic, stream = self._join(task_id, viewer, descriptor)
        except BaseException:
            leave()
            raise
        return _Parts(self._events(topic, stream, seen), lambda: self._drop(topic, stream, leave))

    def close(self) -> None:
        """End all streams now, and open none any more."""
        self._closed.set()
        with self._lock:
            for topic in self._topics.values():
                topic.news.notify_all()

    def _enter(self, viewer: Viewer) -> Callable[[], None]:
        if self._closed.is_set() or not self._most:
            raise refuse(503, "this server keeps no page up to date now; open the page again to see what is new")
        own = self._own.enter(viewer.identity.actor)
        if own is None:
            raise refuse(429, f"{OF_ONE_PERSON} pages of yours are kept up to date already; close one of them")
        everybody = self._all.enter("")
        if everybody is None:
            own()
            raise refuse(503, "too many pages are kept up to date at this moment; open the page again to see news")

        def leave() -> None:
            everybody()
            own()

        return leave

    def _join(self, task_id: str, viewer: Viewer, descriptor: int | None) -> tuple[_Topic, _Stream]:
        stream, key = _Stream(viewer, descriptor, time.monotonic()), (task_id, viewer.sees)
        with self._lock:
            topic = self._topics.get(key)
            fresh = topic is not None and time.monotonic() - topic.made < 2 * LOOK_SECONDS
        # Made here only where nobody watches the same: after a restart all pages come back at once.
        shown = None if fresh else self._make(task_id, viewer)
        with self._lock:
            topic = self._topics.setdefault(key, _Topic(task_id, threading.Condition(self._lock)))
            if shown is not None:
                topic.shown, topic.made = shown, time.monotonic()
            topic.streams.add(stream)
            if not self._looking and not self._closed.is_set():
                self._looking = True
                threading.Thread(target=self._look, name="live-pages", daemon=True).start()
        return topic, stream

    def _drop(self, topic: _Topic, stream: _Stream, leave: Callable[[], None]) -> None:
        with self._lock:
            topic.streams.discard(stream)
            if not topic.streams:
                self._topics.pop((topic.task_id, stream.viewer.sees), None)
        leave()

    def _events(self, topic: _Topic, stream: _Stream, seen: str) -> Iterator[bytes]:
        ends = time.monotonic() + LONGEST_SECONDS
        yield b"retry: 2000\n\n"
        while True:
            shown, over = self._wait(topic, stream, seen)
            now = time.monotonic()
            if over:
                yield OVER % over.encode()
                return
            if stream.gone or self._closed.is_set() or now >= ends or now - stream.checked > UNCHECKED_SECONDS:
                return
            if shown is None or shown.version == seen:
                yield b":\n\n"
                continue
            news, seen = shown.since(seen), shown.version
            yield encode_event("rounds", seen, news)

    def _wait(self, topic: _Topic, stream: _Stream, seen: str) -> tuple[Shown | None, str]:
        """Wait for news, as long as a stream may be silent. Returns what is shown now, and why the stream is over."""
        with self._lock:
            topic.news.wait_for(lambda: self._is_news(topic, stream, seen), KEEP_ALIVE_SECONDS)
            return topic.shown, stream.over

    def _is_news(self, topic: _Topic, stream: _Stream, seen: str) -> bool:
        changed = topic.shown is not None and topic.shown.version != seen
        return changed or stream.gone or bool(stream.over) or self._closed.is_set()

    def _look(self) -> None:
        checked = time.monotonic()
        while not self._closed.wait(LOOK_SECONDS):
            with self._lock:
                topics = [topic for topic in self._topics.values() if topic.streams]
                if not topics:
                    self._looking = False
                    return
                self._find_gone(topics)
            try:
                news = self._find_news(topics)
                everybody = time.monotonic() - checked >= RECHECK_SECONDS
                self._recheck(topics if everybody else [topic for topic, _ in news])
                if everybody:
                    checked = time.monotonic()
            except SQLAlchemyError as error:
                # Viewers who cannot be checked for too long are cut off by their streams.
                _log.warning("live pages: the database cannot be read (%s)", type(error).__name__)
                continue
            except Exception:  # noqa: BLE001 - without this thread all pages would stand still
                _log.exception("live pages: a look failed")
                continue
            with self._lock:
                for topic, shown in news:
                    topic.shown = shown
                    topic.news.notify_all()
        with self._lock:
            self._looking = False

    def _find_gone(self, topics: Collection[_Topic]) -> None:
        """Have the streams end whose readers have closed their connections. Under the lock: a stream leaves its topic
        under it before its connection is closed, so no descriptor is that of another connection."""
        poll, streams = select.poll(), {}
        for topic in topics:
            for stream in topic.streams:
                if stream.descriptor is not None:
                    poll.register(stream.descriptor, _GONE)
                    streams[stream.descriptor] = (topic, stream)
        for descriptor, happened in poll.poll(0):
            if happened & _GONE:
                topic, stream = streams[descriptor]
                stream.gone = True
                topic.news.notify_all()

    def _find_news(self, topics: Collection[_Topic]) -> list[tuple[_Topic, Shown]]:
        """The topics that show something else than before, and what."""
        stamps, now = self._stamps({topic.task_id for topic in topics}), time.monotonic()
        due = []
        for topic in topics:
            stale = topic.shown is None or (topic.shown.lively and now - topic.made >= RENEW_SECONDS)
            if stale or stamps.get(topic.task_id) != topic.stamp:
                due.append(topic)
        news = []
        for topic in sorted(due, key=lambda each: each.made)[:MOST_MADE]:
            viewer = next((stream.viewer for stream in list(topic.streams) if not stream.over), None)
            if viewer is None:
                continue
            try:
                shown = self._make(topic.task_id, viewer)
            except RefusalError:
                # Whether this viewer alone may not look is found out by the check of all sessions.
                continue
            topic.made, topic.stamp = now, stamps.get(topic.task_id)
            if topic.shown is None or shown.version != topic.shown.version:
                news.append((topic, shown))
        return news

    def _recheck(self, topics: Collection[_Topic]) -> None:
        """Have the streams end whose viewers may look no more."""
        with self._lock:
            streams = [(topic, stream) for topic in topics for stream in topic.streams]
        if not streams:
            return
        now = time.monotonic()
        alive = self._alive({stream.viewer.session for _, stream in streams})
        with self._lock:
            for topic, stream in streams:
                if stream.viewer.session in alive:
                    stream.checked = now
                else:
                    stream.over = "your session has ended"
                    topic.news.notify_all()


class _Parts:
    """Parts of a body that are given up once, also where nothing of them was ever sent."""

    def __init__(self, parts: Iterator[bytes], leave: Callable[[], None]) -> None:
        self._parts, self._leave = parts, leave

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        try:
            return next(self._parts)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        leave, self._leave = self._leave, lambda: None
        leave()


def encode_event(name: str, version: str, data: str) -> bytes:
    """A server-sent event (HTML, section 9.2). A browser joins the data's lines again."""
    lines = "".join(f"data: {line}\n" for line in data.splitlines())
    return f"event: {name}\nid: {version}\n{lines}\n".encode()
