# syntax=docker/dockerfile:1
# The server on NVIDIA GPUs. From the repository root:
#   docker build -f deploy/docker/cuda.Dockerfile -t gdn:0.1.0-cuda .
# The toolkit and its one library that is needed at run time come from NVIDIA's image; everything else is
# the distribution whose gRPC the server is written for. The driver's libraries are put in by the
# NVIDIA container toolkit. For a build that can be repeated give digests as BASE and CUDA.
ARG BASE=debian:12.12-slim
ARG CUDA=nvidia/cuda:13.0.1-devel-ubuntu24.04

FROM ${CUDA} AS cuda

FROM ${BASE} AS build
ARG ARCHITECTURES="80;89;90a;100;120"
SHELL ["/bin/bash", "-euc"]
COPY scripts/common.sh /src/scripts/
RUN . /src/scripts/common.sh; install_packages "${build_packages[@]}"
COPY --from=cuda /usr/local/cuda-13.0 /usr/local/cuda
COPY . /src
RUN export PATH="$PATH:/usr/local/cuda/bin"; \
    cmake -S /src -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_INSTALL_PREFIX=/usr \
      -DGDN_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES="${ARCHITECTURES}" -DGDN_TESTS=OFF -DGDN_BENCH=OFF; \
    ninja -C /build; \
    DESTDIR=/installed cmake --install /build --component runtime --strip; \
    mkdir -p /installed/usr/lib/x86_64-linux-gnu; \
    cp -L /usr/local/cuda/targets/x86_64-linux/lib/libcublasLt.so.13 \
      /installed/usr/lib/x86_64-linux-gnu/

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
      org.opencontainers.image.description="Serves Gated DeltaNet models over gRPC, on NVIDIA GPUs" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}"

ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Any other user works as well: nothing is written, and everything is readable by all.
USER 65532:65532
EXPOSE 50051 9090
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s CMD ["/usr/bin/gdnctl", "health"]
ENTRYPOINT ["/usr/bin/gdn_server", "--listen=0.0.0.0:50051", "--metrics-listen=0.0.0.0:9090"]
# Another model: mount it and say --model=/models/its-folder.
CMD ["--model=/usr/share/gdn/models/demo-gdn-7m", "--device=cuda", "--log-format=json"]
