# An archipel device as a container. From the sources' top folder:
#
#   docker build -f docker/device.Dockerfile -t archipel-device .
#
# device.toml has folder = "/var/lib/archipel-device", and examples in /data or store = true:
#
#   docker volume create device
#   docker run --rm -v device:/var/lib/archipel-device -v "$PWD/device.toml:/etc/archipel/device.toml:ro" \
#       -v "$PWD/my.token:/run/my.token:ro" archipel-device enroll /etc/archipel/device.toml /run/my.token
#   docker run -d --name device --restart on-failure:20 --init --stop-timeout 60 \
#       --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges --memory 1g --cpus 1 --pids-limit 64 \
#       -v device:/var/lib/archipel-device -v "$PWD/device.toml:/etc/archipel/device.toml:ro" \
#       -v "$PWD/data:/data:ro" archipel-device
#   docker exec device archipel device status /etc/archipel/device.toml
#
# A setting can come from the environment, too: -e ARCHIPEL_DEVICE_ALLOW_PLAIN=true. The volume holds the device's key:
# who has the volume is the device.
FROM python:3.12-slim AS build
COPY . /sources
RUN python -m venv /opt/archipel \
    && /opt/archipel/bin/pip install --no-cache-dir --constraint /sources/constraints.txt /sources

FROM python:3.12-slim
COPY --from=build /opt/archipel /opt/archipel
ENV PATH=/opt/archipel/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
# The volume takes over its owner.
RUN useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin archipel \
    && install -d -o archipel -g archipel -m 0700 /var/lib/archipel-device
USER 10001:10001
WORKDIR /var/lib/archipel-device
VOLUME /var/lib/archipel-device
STOPSIGNAL SIGTERM
ENTRYPOINT ["archipel", "device"]
CMD ["run", "/etc/archipel/device.toml"]
