# paraft alone, for engines that run images: no shell, no root, nothing to write but what is mounted.
#
#   docker build -t paraft .
#
# A job with a script needs an image of its own: FROM one that has its Python, with
# COPY --from=paraft /bin/paraft /usr/local/bin/
FROM docker.io/library/rust:1-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --release && tools/rootfs target/release/paraft /rootfs

FROM scratch
COPY --from=build /rootfs/ /
ENV PATH=/bin
# Nobody of any host's.
USER 65532:65532
ENTRYPOINT ["/bin/paraft"]
