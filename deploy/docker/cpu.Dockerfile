# syntax=docker/dockerfile:1
# The server on the CPU. From the repository root:
#   docker build -f deploy/docker/cpu.Dockerfile -t gdn:0.1.0-cpu .
# For a build that can be repeated give the base's digest: --build-arg BASE=debian@sha256:...
ARG BASE=debian:12.12-slim

FROM ${BASE} AS build
SHELL ["/bin/bash", "-euc"]
COPY scripts/common.sh /src/scripts/
RUN . /src/scripts/common.sh; install_packages "${build_packages[@]}"
COPY . /src
RUN cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=/usr \
      -DGDN_CUDA=OFF -DGDN_TESTS=OFF -DGDN_BENCH=OFF; \
    ninja -C /build; \
    DESTDIR=/installed cmake --install /build --component runtime --strip

FROM ${BASE}
COPY deploy/docker/runtime-packages.txt /usr/share/gdn/
RUN apt-get update \
    && xargs -a /usr/share/gdn/runtime-packages.txt \
       apt-get install -y --no-install-recommends \
    && rm -rf /var/lib/apt/lists/* /var/cache/* /var/log/*
COPY --from=build /installed /

ARG VERSION=0.1.0
ARG REVISION=unknown
LABEL org.opencontainers.image.title="gdn" \
      org.opencontainers.image.description="Serves Gated DeltaNet models over gRPC, on the CPU" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

# Any other user works as well: nothing is written, and everything is readable by all.
USER 65532:65532
EXPOSE 50051 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s CMD ["/usr/bin/gdnctl", "health"]
ENTRYPOINT ["/usr/bin/gdn_server", "--listen=0.0.0.0:50051", "--metrics-listen=0.0.0.0:9090"]
# Another model: mount it and say --model=/models/its-folder.
CMD ["--model=/usr/share/gdn/models/demo-gdn-7m", "--log-format=json"]
