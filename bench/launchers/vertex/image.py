"""Container image of jobs: the text of its Dockerfile, and the commands that build and push it. There are no side
effects."""

from pathlib import Path

import bench

DIGEST = "ZEROSCALE_CONTAINER_DIGEST"
"""Environment variable with the name of the job's container image. Because of this name, runs in different images count
as runs in different environments, and use different builds of DeepSpeed's ops."""
_FOLDER = "{folder}"
"""Placeholder in a command for the folder with the Dockerfile and the files that it copies."""
_DOCKERFILE = """\
# Image of the jobs of launcher=vertex. The folder also has the wheel of zeroscale, and what the study's points need.
FROM {base}
ENV DEBIAN_FRONTEND=noninteractive PATH=/opt/venv/bin:$PATH HF_HOME=/opt/cache/huggingface XDG_CACHE_HOME=/opt/cache
RUN apt-get update && apt-get install -y --no-install-recommends build-essential ca-certificates libaio-dev \\
    ninja-build python3-dev python3-venv && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/venv
WORKDIR /opt/zeroscale
# Another index of torch's builds, such as that of its builds for processors: --build-arg TORCH_INDEX_URL=…
ARG TORCH_INDEX_URL=""
RUN pip install --no-cache-dir torch ${{TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"}}
COPY zeroscale-*.whl ./
RUN pip install --no-cache-dir "$(ls zeroscale-*.whl)[run,adapters,vertex]"
ENV {digest}={image}
"""
# DeepSpeed compiles its ops with a CUDA toolkit of the same major version as that of torch.
_CUDA, _CPU = "nvidia/cuda:12.8.1-devel-ubuntu24.04", "ubuntu:24.04"


def build_dockerfile(image: str, *, has_gpu: bool) -> str:
    """Return the Dockerfile of an image with zeroscale and its libraries, for GPUs or for processors only."""
    return _DOCKERFILE.format(base=_CUDA if has_gpu else _CPU, digest=DIGEST, image=image)


def list_commands(image: str) -> tuple[tuple[str, ...], ...]:
    """Return the commands that make the wheel of zeroscale, and build and push the image."""
    source = Path(bench.__path__[0]).parent
    wheel = ("pip", "wheel", "--no-deps", "--wheel-dir", _FOLDER, str(source))
    return (
        # Without a checkout there is no source. The wheel that was installed must then be copied into the folder.
        *((wheel,) if (source / "pyproject.toml").exists() else ()),
        ("docker", "build", "--tag", image, _FOLDER),
        ("gcloud", "auth", "configure-docker", image.partition("/")[0]),
        ("docker", "push", image),
    )
