"""A PostgreSQL cluster of this room's own: it is crashed here."""

from tests.support.fixtures.postgresql import cluster as cluster
from tests.support.fixtures.postgresql import database_url as database_url
from tests.support.fixtures.postgresql import template as template
