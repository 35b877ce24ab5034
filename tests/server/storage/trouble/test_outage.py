"""A server whose object store is away for a while: nothing acknowledged is lost, and nothing fails that could wait."""

from __future__ import annotations

import numpy as np
import pytest

from archipel.server.storage import StorageUnreachableError
from tests.server.processes.coordinator.test_coordinator import set_updates, weights
from tests.support.places import WorldOnBucket
from tests.support.store_proxy import Proxy


@pytest.mark.sampled(every=8)
def test_uploads_are_asked_for_again_and_a_round_waits(proxy: Proxy, world: WorldOnBucket) -> None:
    task = world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    expected = set_updates(devices)
    world.run_to("masking", devices)
    for device in devices[:4]:
        device.masking()
    proxy.close()
    with pytest.raises(AssertionError, match="503"):
        devices[4].masking()
    path, token = f"{devices[4].round}/update", {"Authorization": f"Bearer {devices[4].token}"}
    with world.app.test_client() as client:
        headers = {"Digest-SHA256": "0" * 64, **token}
        answer = client.put(path, data=bytes(len(devices[4].masked)), headers=headers)
        assert answer.status_code == 422  # before it goes to the store
    assert [row["phase"] for row in world.rounds(task["task_id"])] == ["masking"]
    proxy.open = True
    devices[4].upload(devices[4].masked)
    world.settle()
    for name in ("confirming", "unmasking"):
        for device in devices:
            device.answer(name)
        if name == "confirming":
            world.settle()
    world.coordinator.step()
    assert [row["phase"] for row in world.rounds(task["task_id"])] == ["aggregating"]
    proxy.close()
    # The coordinator waits for what is an OSError and tries again.
    with pytest.raises(StorageUnreachableError):
        world.coordinator.step()
    assert [row["phase"] for row in world.rounds(task["task_id"])] == ["aggregating"]
    proxy.open = True
    world.settle()
    assert world.task(task["task_id"])["state"] == "completed"
    np.testing.assert_array_equal(weights(world, task["task_id"]), expected)
    assert world.stored("updates") == {}


@pytest.mark.sampled(every=4)
def test_the_store_goes_away_when_the_round_is_over(proxy: Proxy, world: WorldOnBucket) -> None:
    """Its updates are deleted when the store is back."""
    world.create_task()
    devices = world.add_devices(5)
    world.start_round(devices)
    set_updates(devices)
    world.run_to("confirming", devices)
    proxy.close()
    world.clock.now += 200
    with pytest.raises(StorageUnreachableError):
        world.coordinator.step()
    assert devices[0].status().phase == "failed"
    assert len(world.stored("updates")) == 5
    proxy.open = True
    world.coordinator.recover()
    assert world.stored("updates") == {}
