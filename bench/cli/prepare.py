"""Fetch and build everything that a sweep needs on nodes without a network, and check it. Run it on
a login node.

  zeroscale prepare study=paper launcher=my_cluster
  zeroscale prepare data=text data.tokenizer=google/mt5-base optimizer.implementation=native --arch 8.0,9.0
  srun --gpus=1 zeroscale prepare study=paper launcher=my_cluster --offline

The command fetches data sets and tokenizers, and tokenises the corpus into Hugging Face's cache
(HF_HOME). It builds DeepSpeed's ops for each kind of node, which is a combination of processor or
GPU, software versions and container image. Then a process without a network loads everything as a
run would. With `--offline` only this check is made. On a compute node the check shows what a run
will find there, and builds ops that are missing for that kind of node. The exit code is 0 if
nothing is missing.
"""

import argparse

from bench import api
from bench.cli import options
from bench.core import terminal


def arguments(parser: argparse.ArgumentParser) -> None:
    options.add_overrides(parser, "study=NAME, or settings of config keys; comma lists as for `zeroscale sweep`")
    help_text = "only check, and fetch nothing; for compute nodes without a network"
    parser.add_argument("--offline", action="store_true", help=help_text)
    help_text = "GPU architectures for which ops are built, such as 8.0,9.0; default: this machine's GPU"
    parser.add_argument("--arch", metavar="LIST", help=help_text)
    options.add_json(parser)
    options.add_config_dir(parser)
    options.add_results(parser)


def run(args: argparse.Namespace) -> int:
    """Fetch data sets and tokenizers, build DeepSpeed's ops, and check that a run would find all of them. Print the
    findings. Return the exit code: 0 if nothing is missing."""
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
