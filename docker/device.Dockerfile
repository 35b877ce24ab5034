# An archipel device as a container, for x86-64 and arm64, of the packages in dist/. From the sources' top folder:
#
#   make dist && docker build -f docker/device.Dockerfile -t archipel-device .
#   make dist && docker buildx build --platform linux/amd64,linux/arm64 -f docker/device.Dockerfile -t NAME --push .
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
ARG BASE=docker.io/library/debian:13.2-slim

FROM ${BASE} AS build
# Debian's Python, whose updates come with the base's; a version named here would be gone with the next of them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# pip and what makes the bill of materials stay here.
RUN python3 -m venv /opt/tools && python3 -m venv --without-pip /opt/archipel \
    && /opt/tools/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0
COPY constraints.txt dist/archipel-*.whl /packages/
RUN /opt/tools/bin/pip --python /opt/archipel/bin/python install --no-cache-dir \
        --constraint /packages/constraints.txt /packages/archipel-*.whl \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/archipel/sbom.cdx.json \
        /opt/archipel/bin/python

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin archipel \
    && install -d -o archipel -g archipel -m 0700 /var/lib/archipel-device
COPY --from=build /opt/archipel /opt/archipel
LABEL org.opencontainers.image.title="archipel device" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.archipel.sbom="/opt/archipel/sbom.cdx.json"
ENV PATH=/opt/archipel/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/archipel-device
# A new volume takes over the folder's owner.
VOLUME /var/lib/archipel-device
STOPSIGNAL SIGTERM
# An agent at work holds the lock of its folder; its keys and its journal are read.
HEALTHCHECK --interval=5m --timeout=30s --start-period=2m \
    CMD ["/bin/sh", "-c", "archipel device status --json /etc/archipel/device.toml | grep --quiet '\"running\": true'"]
ENTRYPOINT ["archipel", "device"]
CMD ["run", "/etc/archipel/device.toml"]
