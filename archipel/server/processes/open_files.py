"""How many connections a web process may have: each of them is an open file, and systems limit those.

Many systems begin programs with a limit of 1,024 files that they may raise by themselves. A process that accepts one
connection more than it may have files ends, with everybody's requests.
"""

from __future__ import annotations

from archipel.errors import ServerError
from archipel.server.settings import Settings

MOST_CONNECTIONS = 4000
FEWEST_CONNECTIONS = 64
_OF_A_PROCESS = 128
"""Libraries, logs, pipes, and what the processes share."""
_OF_A_THREAD = 6
"""Files of a thread that works on a request: two of each of its connections to SQLite, and those that it copies."""


def allow_connections(settings: Settings) -> int:
    """Raise this process's limit of open files as far as its web processes need it and the system allows.

    Returns:
        How many connections each web process may have: MOST_CONNECTIONS, or what the limit has room for.

    Raises:
        ServerError: The system does not allow enough files for FEWEST_CONNECTIONS.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return MOST_CONNECTIONS
    besides = _OF_A_PROCESS + _OF_A_THREAD * settings.working_threads
    needed = besides + MOST_CONNECTIONS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    connections = MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else min(soft - besides, MOST_CONNECTIONS)
    if connections < FEWEST_CONNECTIONS:
        raise ServerError(
            f"a process may have {soft} open files here, and a web process of this server needs "
            f"{besides + FEWEST_CONNECTIONS}; raise the limit (ulimit -n, LimitNOFILE of systemd) or lower threads"
        )
    return connections
