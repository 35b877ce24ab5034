"""Devices that are revoked or have had several keys, and enrolment tokens that are revoked."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("devices", sa.Column("revoked", sa.Float(), nullable=True))
    op.create_index(op.f("ix_devices_enrolled_device_id"), "devices", ["enrolled", "device_id"])
    op.create_index(
        op.f("ix_devices_population_enrolled_device_id"), "devices", ["population", "enrolled", "device_id"]
    )
    op.create_index(op.f("ix_participants_device_id"), "participants", ["device_id"])
    op.create_table(
        "device_keys",
        sa.Column("device_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("device_id", sa.String(length=32), nullable=False),
        sa.Column("since", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(["device_id"], ["devices.device_id"], name=op.f("fk_device_keys_device_id")),
        sa.PrimaryKeyConstraint("device_key", name=op.f("pk_device_keys")),
    )
    op.execute(
        "INSERT INTO device_keys (device_key, device_id, since) SELECT device_key, device_id, enrolled FROM devices"
    )
    op.create_table(
        "revoked_tokens",
        sa.Column("token_id", sa.String(length=32), nullable=False),
        sa.Column("token_key", sa.LargeBinary(length=32), nullable=False),
        sa.Column("population", sa.String(length=128), nullable=True),
        sa.Column("revoked", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("token_id", name=op.f("pk_revoked_tokens")),
    )
