"""Settings, schema, files: what is on disk and what becomes of it."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from archipel.bundle import generate_key, load_private_key, load_public_key, save_private_key
from archipel.durable import make_folder
from archipel.errors import ServerError
from archipel.server.data_folder import init_data_folder, keep_public_key
from archipel.server.database.engine import MIGRATIONS, SCHEMA, Database
from archipel.server.database.tables import Base
from archipel.server.settings import Settings, load_settings
from archipel.server.storage.received import write_temporary
from tests.support.world import DataFolder, World

KEY = bytes(range(32))


def test_a_data_folder(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "server"
    token = init_data_folder(folder, enrolment_key=KEY, publisher_keys=[KEY, KEY[::-1]])
    settings = load_settings(folder, environment={})
    assert settings.operator_token_sha256 == hashlib.sha256(token.encode()).hexdigest()
    assert settings.trusted_keys == [KEY, KEY[::-1]]
    assert settings.enrolment_public_key == KEY
    assert settings.public_key == load_private_key(folder / "server.key").public_key().public_bytes_raw()
    assert load_public_key(folder / "server.key.pub") == settings.public_key
    assert settings.database_url == f"sqlite:///{folder}/archipel.db"
    assert stat.S_IMODE((folder / "server.key").stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "server.toml").stat().st_mode) == 0o600
    assert all(token not in path.read_text() for path in folder.iterdir())
    with pytest.raises(ServerError, match="exists already"):
        init_data_folder(folder, enrolment_key=KEY, publisher_keys=[KEY])
    (folder / "server.toml").unlink()
    with pytest.raises(ServerError, match="not empty; choose a new or an empty folder"):
        init_data_folder(folder, enrolment_key=KEY, publisher_keys=[KEY])
    with pytest.raises(ServerError, match="a file; a data folder is new or empty"):
        init_data_folder(folder / "server.key", enrolment_key=KEY, publisher_keys=[KEY])
    empty = tmp_path / "empty"
    empty.mkdir(mode=0o755)
    init_data_folder(empty, enrolment_key=KEY, publisher_keys=[KEY])
    assert stat.S_IMODE(empty.stat().st_mode) == 0o700


def test_the_public_half_follows_the_server_key(data_folder: DataFolder) -> None:
    folder, _, _ = data_folder
    file = folder / "server.key.pub"
    save_private_key(generate_key(), folder / "new.key")
    for change in (file.unlink, lambda: file.write_text("junk"), lambda: (folder / "new.key").rename("server.key")):
        with contextlib.chdir(folder):
            change()
        settings = load_settings(folder, environment={})
        keep_public_key(settings)
        assert load_public_key(file) == settings.public_key


def test_bad_keys(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="32 bytes, got 3"):
        init_data_folder(tmp_path, enrolment_key=b"abc", publisher_keys=[KEY])
    with pytest.raises(ServerError, match="at least one publisher key"):
        init_data_folder(tmp_path, enrolment_key=KEY, publisher_keys=[])
    assert list(tmp_path.iterdir()) == []


def test_settings_from_the_environment_and_the_caller(data_folder: DataFolder) -> None:
    folder, _, _ = data_folder
    environment = {
        "ARCHIPEL_SERVER_PORT": "9000",
        "ARCHIPEL_SERVER_RETRY_AFTER": "0.1",
        "ARCHIPEL_SERVER_PUBLISHER_KEYS": "ab" * 32 + "," + "cd" * 32,
        "UNRELATED": "1",
    }
    settings = load_settings(folder, environment=environment, port=0)
    assert (settings.port, settings.retry_after) == (0, 0.1)
    assert settings.publisher_keys == ("ab" * 32, "cd" * 32)
    assert load_settings(folder, environment=settings.environment()) == settings


def test_every_setting_can_be_set_by_the_environment(data_folder: DataFolder) -> None:
    folder, _, _ = data_folder
    settings = load_settings(folder, environment={})
    assert len(settings.environment()) == len(Settings.__struct_fields__) - 3  # but folder, upstream and openid


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("port = 'high'", "server.toml: port: expected `int`, got `str`"),
        ("port = 70000", "server.toml: port: expected `int` <= 65535, got 70000$"),
        ("prot = 80", r"unknown field 'prot'; did you mean 'port'\?"),
        ("zzzzzz = 80", "unknown field 'zzzzzz'; there are: .*, port, "),
        ("retry_after = nan", "retry_after: expected a finite number, got nan"),
        ("concurrent_requests = 16", r"concurrent_requests \(16\) must be below threads \(16\)"),
        ("database = 'postgres://me:secret@host/x'", "starts with postgresql://, not with postgres://$"),
        ("folder = '/'", "'folder'"),
        ("port = ", "Invalid value"),
        ("retry_after = 5.0", "check_in_window"),
        ("enrolment_key = 'zz'", "enrolment_key: expected 64 hexadecimal digits, got 2 characters$"),
    ],
)
def test_settings_that_cannot_be(data_folder: DataFolder, text: str, said: str) -> None:
    folder, _, _ = data_folder
    path = folder / "server.toml"
    name = text.split(" =")[0]
    kept = [line for line in path.read_text().splitlines() if not line.startswith(name)]
    path.write_text("\n".join([*kept, text]))
    with pytest.raises(ServerError, match=said):
        load_settings(folder, environment={})


def test_environment_variables_that_cannot_be(data_folder: DataFolder) -> None:
    folder, _, _ = data_folder
    with pytest.raises(ServerError, match="ARCHIPEL_SERVER_PROT: no such setting"):
        load_settings(folder, environment={"ARCHIPEL_SERVER_PROT": "80"})
    with pytest.raises(ServerError, match=r"^environment variable ARCHIPEL_SERVER_PORT: expected `int`"):
        load_settings(folder, environment={"ARCHIPEL_SERVER_PORT": "high"})
    with pytest.raises(ServerError, match=r"^environment variable ARCHIPEL_SERVER_FOLDER: no such setting"):
        load_settings(folder, environment={"ARCHIPEL_SERVER_FOLDER": "/"})
    with pytest.raises(
        ServerError, match=r"^environment variable ARCHIPEL_SERVER_CHECK_IN_WINDOW: check_in_window \(1.0"
    ):
        load_settings(folder, environment={"ARCHIPEL_SERVER_CHECK_IN_WINDOW": "1"})
    secret = "sesame" * 8
    with pytest.raises(ServerError, match=r"expected 64 hexadecimal digits, got 48 characters$"):
        load_settings(folder, environment={"ARCHIPEL_SERVER_OPERATOR_TOKEN_SHA256": secret})
    with pytest.raises(ServerError, match=r"^port: expected `int` <= 65535, got 99999$"):
        load_settings(folder, environment={}, port=99999)


def test_no_data_folder(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="archipel serve init"):
        load_settings(tmp_path)


@pytest.mark.sampled(every=3)
def test_models_and_migrations_agree(world: World) -> None:
    with world.services.database.engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), Base.metadata) == []
    assert ScriptDirectory(str(MIGRATIONS)).get_current_head() == SCHEMA


def test_the_database_is_as_durable_as_it_can_be(world: World) -> None:
    with world.services.database.engine.connect() as connection:
        pragmas = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys", "busy_timeout")
        }
    assert pragmas == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1, "busy_timeout": 10_000}


def test_migrating_twice_and_a_database_from_the_future(world: World) -> None:
    world.services.database.migrate()
    world.services.database.check()
    with world.services.database.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(ServerError, match="made by a newer version"):
        world.services.database.migrate()
    with pytest.raises(ServerError, match=f"schema 9999, expected {SCHEMA}"):
        world.services.database.check()


def test_databases_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "text.db").write_text("this is not a database, it is some text" * 100)
    for url, said in (
        (f"sqlite:///{tmp_path}/text.db", "file is not a database"),
        (f"sqlite:///{tmp_path}/missing/x.db", "unable to open database file"),
    ):
        database = Database(url)
        with pytest.raises(ServerError, match=said):
            database.migrate()
        database.dispose()
    with pytest.raises(ServerError, match="expected an SQLAlchemy URL"):
        Database("nonsense")
    with pytest.raises(ServerError, match="expected an SQLAlchemy URL"):
        Database("oracle9://host/db")


def test_a_reader_does_not_wait_for_a_writer(world: World) -> None:
    with world.services.database.write() as writing:
        writing.connection().exec_driver_sql("SELECT 1")
        other = sqlite3.connect(world.settings.path("archipel.db"), timeout=0.05)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
        other.close()
        with world.services.database.read() as reading:
            assert reading.connection().exec_driver_sql("SELECT count(*) FROM tasks").scalar() == 0


def test_a_write_that_fails_leaves_nothing(world: World) -> None:
    with pytest.raises(RuntimeError), world.services.database.write() as session:  # noqa: PT012
        session.connection().exec_driver_sql(
            "INSERT INTO blobs (digest, kind, size, created) VALUES ('a', 'b', 1, 1.0)"
        )
        raise RuntimeError
    with world.services.database.read() as session:
        assert session.connection().exec_driver_sql("SELECT count(*) FROM blobs").scalar() == 0


def test_a_full_disk_is_an_error_and_leaves_nothing() -> None:
    # /dev/full takes nothing; as a folder it cannot be used, so the write goes to a size-limited process instead.
    code = """
import resource, sys, signal
from pathlib import Path
from archipel.server.storage.received import write_temporary
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    write_temporary(Path(sys.argv[1]), [b"x" * 600, b"y" * 600])
except OSError as error:
    print(error.errno, list(Path(sys.argv[1]).iterdir()))
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert done.stdout == "27 []\n"


def test_folders_are_made_once(tmp_path: Path) -> None:
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder(tmp_path / "a" / "b" / "c")
    written = write_temporary(tmp_path / "a" / "b" / "c", [b"1"])
    written.publish(tmp_path / "a" / "b" / "c" / "one")
    assert (tmp_path / "a" / "b" / "c" / "one").read_bytes() == b"1"
    assert len(list((tmp_path / "a" / "b" / "c").iterdir())) == 1


@pytest.mark.sampled(every=8)
def test_importing_the_server_needs_neither_onnx_nor_torch() -> None:
    code = """
import sys
import archipel.server
assert "flask" not in sys.modules and "sqlalchemy" not in sys.modules
for name in archipel.server.__all__:
    getattr(archipel.server, name)
import archipel.server.app, archipel.server.processes.coordinator, archipel.operator.client
print(sorted(set(sys.modules) & {"onnx", "torch", "onnxruntime", "onnx_ir", "onnxscript"}))
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.sampled(every=4)
def test_without_the_server_extra_the_operators_half_still_works(tmp_path: Path) -> None:
    # A finder that knows nothing of these packages, in front of all others.
    blocked = ("flask", "sqlalchemy", "alembic", "gunicorn", "werkzeug")
    (tmp_path / "sitecustomize.py").write_text(
        f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocked())
"""
    )
    code = """
import archipel.server
from archipel.errors import MissingExtraError
from archipel.server import OperatorClient, TaskRequest, init_data_folder, load_settings
for name in ("create_app", "supervise", "run_coordinator"):
    try:
        getattr(archipel.server, name)
    except MissingExtraError as error:
        print(error)
"""
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert (
        done.stdout.splitlines() == ["sqlalchemy is not installed; install it with: pip install 'archipel[server]'"] * 3
    )
