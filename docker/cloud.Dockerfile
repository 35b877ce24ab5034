# Training, conversion and simulation on a GPU of NVIDIA, of the packages in dist/. From the sources' top folder:
#
#   make dist && docker build -f docker/cloud.Dockerfile -t archipel-cloud .
#   docker run --rm --gpus all --shm-size 1g --read-only --tmpfs /tmp --cap-drop ALL \
#       --security-opt no-new-privileges -v "$PWD:/work" --user "$(id -u):$(id -g)" archipel-cloud train job.toml
#
# The base brings what the driver's container runtime needs; PyTorch's wheels bring CUDA's libraries themselves. It runs
# jobs that end, so there is no health to check: the exit code says how it went.
ARG BASE=docker.io/nvidia/cuda:12.8.1-base-ubuntu24.04

FROM ${BASE} AS build
# The system's Python, whose updates come with the base's; a version named here would be gone with the next of them.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv \
    && rm -rf /var/lib/apt/lists/*
# pip and what makes the bill of materials stay here.
RUN python3 -m venv /opt/tools && python3 -m venv --without-pip /opt/archipel \
    && /opt/tools/bin/pip install --no-cache-dir cyclonedx-bom==7.5.0
COPY constraints.txt dist/archipel-*.whl dist/archipel_data-*.whl /packages/
ARG EXTRAS=cloud,curves,data,privacy,tuning
RUN set -- /packages/archipel-*.whl \
    && /opt/tools/bin/pip --python /opt/archipel/bin/python install --no-cache-dir \
        --constraint /packages/constraints.txt "$1[${EXTRAS}]" /packages/archipel_data-*.whl \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/archipel/sbom.cdx.json \
        /opt/archipel/bin/python

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin archipel \
    && install -d -o archipel -g archipel -m 0755 /work
COPY --from=build /opt/archipel /opt/archipel
LABEL org.opencontainers.image.title="archipel cloud" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.archipel.sbom="/opt/archipel/sbom.cdx.json"
# Caches of libraries go where a read-only root has room.
ENV PATH=/opt/archipel/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    HOME=/tmp XDG_CACHE_HOME=/tmp MPLCONFIGDIR=/tmp
USER 10001:10001
WORKDIR /work
HEALTHCHECK NONE
ENTRYPOINT ["archipel"]
CMD ["doctor"]
