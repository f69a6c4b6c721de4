"""Stage what a sweep needs on nodes without a network, and check it. For a login node.

  zeroscale prepare study=paper launcher=my_cluster
  zeroscale prepare data=text data.tokenizer=google/mt5-base optimizer.implementation=native --arch 8.0,9.0
  srun --gpus=1 zeroscale prepare study=paper launcher=my_cluster --offline

Data sets and tokenizers are fetched and the corpus is tokenised into Hugging Face's cache (HF_HOME).
DeepSpeed's ops are built for each kind of node: processor or GPU, versions, container image. Then a
process without a network uses everything as a run would. With `--offline` only this check is made:
on a compute node it shows what a run will find there, and builds ops that are missing for that kind
of node. Exit code 0 if nothing is missing.
"""

import argparse

from bench import api
from bench.cli import options
from bench.core import terminal


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_overrides(parser, "as for sweep: study=NAME, comma lists")
    parser.add_argument("--offline", action="store_true", help="only check, as on a compute node; fetch nothing")
    parser.add_argument("--arch", metavar="LIST", help="GPU architectures to build for: 8.0,9.0; default: the GPU here")
    options.add_json(parser)
    options.add_config_dir(parser)
    options.add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Return 0 if nothing is missing."""
    with terminal.progress(quiet=args.json) as follow:
        findings = api.prepare(
            overrides=args.overrides,
            config_dir=args.config_dir,
            results=args.results,
            offline=args.offline,
            architectures=None if args.arch is None else args.arch.split(","),
            follow=follow,
        )
        return terminal.print_findings(findings, as_json=args.json)
