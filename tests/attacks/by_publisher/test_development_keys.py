"""A bundle for trying out, signed with a key that lies unprotected on somebody's laptop, is to reach a fleet.

The key is among those that devices and server trust: somebody copied it from a settings file of the trial. The mark is
in the key, so no bundle can be without it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from archipel import lite_runtime as lite
from archipel.bundle import open_bundle
from archipel.errors import DevelopmentKeyError
from archipel.server import init_data_folder, load_settings
from archipel.server.services import Services
from tests.client.answers.world import World
from tests.support.database import migrated_database
from tests.support.development import PUBLIC, fixed_development_key
from tests.support.federation import open_federation
from tests.support.linear_bundle import make_bundle
from tests.support.registry import FIRST, MODEL, Registry
from tests.support.releases import make_release
from tests.support.scripted_server import scripted


def test_a_device_takes_part_with_none(tmp_path: Path) -> None:
    with scripted(tmp_path) as server:
        server.publisher = fixed_development_key()
        file = make_bundle(tmp_path / "trial", server.publisher, modes=("secure", "plain"))
        server.files["bundle"] = file.read_bytes()
        server.bundle = open_bundle(file, [PUBLIC], tmp_path / "cache", allow_development=True).digest
        world = World(tmp_path, server)
        outcome = world.round(privacy="plain")
        assert outcome.kind == "refused"
        assert "development key" in outcome.reason
        assert world.asked("update") == 0
        world.restart(allow_development=True)
        outcome = world.round(privacy="plain")
        assert outcome.kind == "took_part", outcome.reason
        world.agent.close()


@pytest.mark.sampled(every=3)
def test_a_device_adopts_none(tmp_path: Path) -> None:
    """The server was told to accept it, and offers it as the promoted version; the devices were not."""
    with open_federation(tmp_path, "127.0.0.1", fixed_development_key()) as federation:
        registry = Registry(federation, {})
        registry.add(FIRST)
        careful, trying = registry.device(0), registry.device(1, allow_development=True)
        for agent in (careful, trying):
            agent.run_once()
        assert careful.models == {}
        assert "development key" in registry.told(careful, "kept")[0]["reason"]
        assert trying.models == {MODEL: 1}


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("isolated", [False, True])
def test_no_runtime_runs_it(tmp_path: Path, isolated: bool) -> None:
    file = make_bundle(tmp_path / "trial", fixed_development_key())
    cache = tmp_path / "cache"
    with pytest.raises(DevelopmentKeyError):
        lite.load(file, [PUBLIC], isolated=isolated, cache=cache)
    runtime = lite.load(file, [PUBLIC], isolated=isolated, cache=cache, allow_development=True)
    assert runtime.predict({"x": np.eye(3, dtype=np.float32)[:1]})["p"] == pytest.approx([0.1])


def test_no_device_takes_a_variant_of_it(tmp_path: Path) -> None:
    make_release(tmp_path / "release", fixed_development_key())
    with pytest.raises(DevelopmentKeyError):
        lite.choose(tmp_path / "release", [PUBLIC], cache=tmp_path / "cache")
    choice = lite.choose(tmp_path / "release", [PUBLIC], cache=tmp_path / "cache", allow_development=True)
    assert choice.variant.name == "float"
    with pytest.raises(DevelopmentKeyError):
        lite.load(choice.bundle.folder, [PUBLIC])


def test_no_slot_holds_it(tmp_path: Path) -> None:
    file = make_bundle(tmp_path / "trial", fixed_development_key())
    with lite.Slots(tmp_path / "slots", [PUBLIC]) as slots:
        with pytest.raises(DevelopmentKeyError):
            slots.install(file)
        assert slots.state.slot("a").status == "empty"
    with lite.Slots(tmp_path / "slots", [PUBLIC], allow_development=True) as slots:
        slots.install(file)
        slots.switch()
    # The permission is not kept with the slot.
    with pytest.raises(Exception, match="development key"):
        lite.Slots(tmp_path / "slots", [PUBLIC]).close()


def test_a_server_accepts_none(tmp_path: Path) -> None:
    with pytest.raises(DevelopmentKeyError):
        init_data_folder(tmp_path / "server", enrolment_key=bytes(32), publisher_keys=[PUBLIC])
    assert not (tmp_path / "server").exists()
    init_data_folder(tmp_path / "server", enrolment_key=bytes(32), publisher_keys=[PUBLIC], allow_development=True)
    assert load_settings(tmp_path / "server", environment={}).allow_development
    (tmp_path / "server" / "archipel.db").write_bytes(migrated_database())
    file = make_bundle(tmp_path / "trial", fixed_development_key())
    for allowed in (False, True):
        services = Services.open(load_settings(tmp_path / "server", environment={}, allow_development=allowed))
        services.prepare()
        written = services.blobs.receive([file.read_bytes()])
        services.blobs.keep(written)
        if allowed:
            assert services.open_bundle(written.digest).publisher == PUBLIC
        else:
            with pytest.raises(DevelopmentKeyError):
                services.open_bundle(written.digest)
