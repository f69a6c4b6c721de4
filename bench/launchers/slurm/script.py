"""Generation of job scripts from a site's options.

There are no side effects. The only file that is read is the script's template.
"""

import functools
import math
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import jinja2

import bench
from bench.core.errors import UserError
from bench.core.processes import build_module_command
from bench.core.scheduling import LaunchPlan, Work
from bench.launchers.slurm.options import Container, Options

_PLAIN = re.compile(r"[\w@%+=:,./~-]+", re.ASCII)


def plan(work: Work, options: Options) -> LaunchPlan:
    """Return a plan with the text of the job script, which belongs into the folder of `work`, and with the `sbatch`
    command that submits the script.

    Raise UserError if the folder's path contains characters that a job script cannot contain.
    """
    folder = work.folder.absolute()
    _check_folders(folder, options)
    path = folder / "job.sh"
    return LaunchPlan(("sbatch", "--parsable", str(path)), {}, folder, {path: _render(work, options, path)})


def find_log(folder: Path, handle: str, task: int | None) -> Path:
    """Return the log file of a job, or of one task of a job array. `handle` is the job id."""
    return folder / (f"slurm-{handle}.log" if task is None else f"slurm-{handle}_{task}.log")


def quote_directive(value: object) -> str:
    """Return a value quoted for an #SBATCH line.

    sbatch parses these lines itself. It supports quotes and backslashes, but no other shell syntax. The parser is the
    function `_get_argument` in src/sbatch/opt.c. Its rules have not changed since 2006.
    """
    text = str(value)
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return text if _PLAIN.fullmatch(text) else f'"{escaped}"'


def _check_folders(folder: Path, options: Options) -> None:
    if "\\" in str(folder) or not str(folder).isprintable():
        rule = "Slurm cannot write a log to a path with a backslash, a line break or an undecodable character"
        raise UserError(repr(str(folder)), rule, "choose another results folder")
    if not str(Path.cwd()).isprintable():
        rule = "a job script cannot contain the path of this folder"
        raise UserError(repr(str(Path.cwd())), rule, "run the command in another folder")
    if options.container and re.search("[,:]", str(folder)):
        rule = "a path with a colon or a comma cannot be mounted into a container"
        raise UserError(str(folder), rule, "choose another results folder")


@functools.cache
def _load_template() -> jinja2.Template:
    """Return the template of a job script, from the checkout or from the installed package `bench`."""
    package = Path(bench.__path__[0])
    inside = package / "slurm"
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(inside if inside.is_dir() else package.parent / "slurm"),
        undefined=jinja2.StrictUndefined,  # a misspelt name raises an error, and is not replaced by an empty string
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"directive": quote_directive, "shell": lambda value: shlex.quote(str(value))}
    return environment.get_template("job.sh.j2")


def _render(work: Work, options: Options, path: Path) -> str:
    small, folder = work.devices_per_node == 0, path.parent
    variables = dict(options.environment)
    if options.container and not small:
        variables["ZEROSCALE_CONTAINER_DIGEST"] = options.container.digest or options.container.image
    limit_min = work.time_limit_min
    # If only the time limit of an attempt (one try at a run) is known, add time for the start of the job.
    if limit_min is None and options.time_limit_min is not None:
        limit_min = math.ceil(options.time_limit_min + options.setup_min)
    tasks, cpus = _count_tasks(work, options)
    return _load_template().render(
        work=work,
        options=options,
        place=_select_place(work, options, small=small),
        script=path,
        # A % in the folder's name is doubled, because Slurm would replace patterns such as %j.
        log=f"{folder}/".replace("%", "%%") + ("slurm-%j.log" if work.tasks is None else "slurm-%A_%a.log"),
        directory=Path.cwd(),
        time_limit_min=limit_min,
        small=small,
        nodes=1 if small else work.nodes,
        gpus=options.gpus and options.gpus.replace("{devices}", str(work.devices_per_node)),
        tasks_per_node=tasks,
        cpus_per_task=cpus,
        variables=variables,
        programs=None if options.python or options.container else Path(sys.executable).parent,
        command=_build_small_command(work, options) if small else _build_command(work, options, folder),
    )


def _select_place(work: Work, options: Options, *, small: bool) -> dict[str, object]:
    """Return the options that determine where and when a job runs, such as partition, account, QOS and begin time.

    If `small` is true, the job is the autopilot's small job, which resumes the sweep. For it, the options in
    `autopilot` take precedence.
    """
    keys = ("partition", "account", "qos", "constraint", "reservation", "nice", "begin")
    place: dict[str, object] = {key: getattr(options, key) for key in keys}
    if not small:
        return place
    own = options.autopilot
    if own.partition is not None:
        place |= {"partition": own.partition, "constraint": None, "reservation": None}
    begin = own.begin or (f"now+{work.delay_min}minutes" if work.delay_min else None)
    return place | {"qos": place["qos"] if own.qos is None else own.qos, "begin": begin}


def _count_tasks(work: Work, options: Options) -> tuple[int, int | None]:
    """Return the number of tasks per node of a job, and the number of cores per task (None: the cluster's default).

    There is one task per node or, with the option span=device, one task per device.
    """
    tasks = work.devices_per_node if options.span == "device" and work.devices_per_node else 1
    if options.cpus_per_device is None or not work.devices_per_node:
        return tasks, None
    return tasks, options.cpus_per_device * work.devices_per_node // tasks


def _build_small_command(work: Work, options: Options) -> list[list[str]]:
    """Return the command of a job that needs no device.

    The command calls Slurm's programs, which are not available in a container. So if the site uses a container, the
    command runs outside of it with the current Python interpreter.
    """
    python = options.python if options.python and not options.container else (sys.executable,)
    return [build_module_command(work.module, *work.arguments, python=python)]


def _build_command(work: Work, options: Options, folder: Path) -> list[list[str]]:
    """Return the command that runs on every node. Each inner list of words is one line of the script."""
    tasks, cpus = _count_tasks(work, options)
    # --export=ALL: a site may configure sbatch to export nothing, and srun would inherit this setting. --cpus-per-task:
    # since Slurm 22.05, srun does not inherit it from sbatch.
    srun = ["srun", "--kill-on-bad-exit=1", "--export=ALL", f"--nodes={work.nodes}", f"--ntasks-per-node={tasks}"]
    srun += [f"--cpus-per-task={cpus}"] if cpus else []
    of_site = {option.partition("=")[0] for option in options.srun}
    srun += [option for option in _list_bindings(options) if option.partition("=")[0] not in of_site]
    inside = _build_container_command(options.container, folder) if options.container else []
    python = options.python or (("python3",) if options.container else (sys.executable,))
    return [srun + list(options.srun), *inside, build_module_command(work.module, *work.arguments, python=python)]


def _list_bindings(options: Options) -> list[str]:
    """Return the srun options that bind processes to the cores and devices of a node.

    With one supervisor per node, the supervisor gets all cores of the job on that node and its ranks share them. A
    cluster's default binding is often a single core. With one task per device, each task is bound to its cores and to
    the memory next to them. Each task sees all devices of its node. So a rank selects its own device by number, and can
    access the memory of the other devices directly.
    """
    sees_all = options.gpus is not None and "per-task" not in options.gpus
    devices = ["--gpu-bind=none"] if sees_all else []
    if options.span == "node":
        return ["--cpu-bind=none", *devices]
    return (["--cpu-bind=cores", "--mem-bind=local"] if options.cpus_per_device else []) + devices


def _build_container_command(container: Container, folder: Path) -> list[list[str]]:
    """Return the beginning of a command line that runs a program in a container, with the study's folder mounted. The
    program and its arguments follow.

    Each inner list is one line of the job script. `folder` is the folder of a job.
    """
    # The folder of a job, like the folder of an attempt, is two levels below the study's folder.
    study = str(folder.parent.parent)
    if container.runtime == "command":
        return [[word.replace("{study}", study).replace("{image}", container.image) for word in container.command]]
    if container.runtime == "apptainer":
        binds = [word for mount in (study, *container.mounts) for word in ("--bind", mount)]
        return [["apptainer", "exec", *container.options], binds, [container.image]]
    mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in (study, *container.mounts))
    return [[f"--container-image={container.image}", f"--container-mounts={mounts}", *container.options]]


def spread(command: Sequence[str], nodes: int) -> list[str]:
    """Return an srun command that starts `command` once on each node of this job. Each process may use all cores that
    the job has on its node."""
    options = ["--overlap", "--kill-on-bad-exit=1", "--export=ALL", "--cpu-bind=none"]
    return ["srun", *options, f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1", *command]
