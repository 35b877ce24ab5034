# The federation server as a container, of the packages in dist/. From the sources' top folder:
#
#   make dist && docker build -f docker/server.Dockerfile -t archipel-server .
#
# Once, for the data folder, which the volume keeps; archipel.pub and enrolment.pub are made by `archipel keys`:
#
#   docker run --rm -v federation:/var/lib/archipel -v "$PWD/keys:/keys:ro" archipel-server serve init \
#       /var/lib/archipel/data --enrolment-key /keys/enrolment.pub --publisher-key /keys/publisher.pub
#   docker run -d --name server --init --read-only --tmpfs /tmp --cap-drop ALL --security-opt no-new-privileges \
#       -p 8470:8470 -v federation:/var/lib/archipel archipel-server
#
# A setting can come from the environment: -e ARCHIPEL_SERVER_DATABASE=postgresql://... docs/deployment.md has the rest.
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
COPY constraints.txt dist/*.whl /packages/
ARG EXTRAS=oidc,postgresql,s3
ARG PACKAGES="archipel_web_page archipel_docs"
RUN set -- /packages/archipel-*.whl \
    && code="$1[${EXTRAS}]" && set -- && for name in ${PACKAGES}; do set -- "$@" /packages/"$name"-*.whl; done \
    && /opt/tools/bin/pip --python /opt/archipel/bin/python install --no-cache-dir \
        --constraint /packages/constraints.txt "$code" "$@" \
    && /opt/tools/bin/cyclonedx-py environment --output-reproducible --output-file /opt/archipel/sbom.cdx.json \
        /opt/archipel/bin/python

FROM ${BASE}
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --shell /usr/sbin/nologin archipel \
    && install -d -o archipel -g archipel -m 0700 /var/lib/archipel
COPY --from=build /opt/archipel /opt/archipel
COPY docker/healthy.py /opt/healthy.py
LABEL org.opencontainers.image.title="archipel server" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.archipel.sbom="/opt/archipel/sbom.cdx.json"
ENV PATH=/opt/archipel/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /var/lib/archipel
# A new volume takes over the folder's owner.
VOLUME /var/lib/archipel
EXPOSE 8470
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python3", "/opt/healthy.py"]
ENTRYPOINT ["archipel"]
CMD ["serve", "start", "/var/lib/archipel/data", "--host", "0.0.0.0"]
