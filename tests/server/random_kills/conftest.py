"""A PostgreSQL cluster of this room's own: it is crashed here."""

from tests.server.postgresql.conftest import cluster as cluster
from tests.server.postgresql.conftest import database_url as database_url
from tests.server.postgresql.conftest import template as template
