"""`sparrow-trl push`, `pull` and `find`: arguments; [`hub`] does the work. Needs neither torch nor TRL."""

import argparse
import sys
from pathlib import Path


def add_hub_commands(commands) -> None:
    """Add the commands to the subparsers `commands` of the command line."""
    _add_push(commands)
    _add_pull(commands)
    _add_find(commands)


def _add_push(commands) -> None:
    push = commands.add_parser(
        "push",
        help="publish a schedule on the Hub, with what belongs to it",
        description="Publish a schedule on the Hub, in one commit: sparsity_schedule.json with a card, and of a "
        "folder also acceptance_table.json, the pictures that sparrow-trl draws, and a DistillSparse adapter. Nothing "
        "else of the folder is uploaded.",
    )
    push.set_defaults(run=_run_push)
    add = push.add_argument
    add("source", help="folder (of calibrate, search, distill or a training run), schedule file, or preset")
    add("repo_id", help="model repository, user/name; created when missing")
    add("--private", action="store_true", default=None, help="make a new repository private; refuse a public one")
    add("--revision", metavar="BRANCH", help="branch to push to, created when missing")
    add("--create_pr", action="store_true", help="open a pull request instead of committing")
    add("--commit_message", default="Upload sparsity schedule", help="message of the commit (%(default)s)")
    add("--license", help="license for the card, such as apache-2.0")
    add("--dataset", action="append", default=[], metavar="ID", help="dataset for the card; repeatable")
    add("--dry_run", action="store_true", help="only list what would be uploaded beside the card")


def _run_push(args: argparse.Namespace) -> None:
    from .hub import collect_files, push_schedule

    if args.dry_run:
        sys.stdout.write("".join(f"{path}\n" for path in sorted(collect_files(args.source)[1])))
        return
    result = push_schedule(
        args.source,
        args.repo_id,
        commit_message=args.commit_message,
        private=args.private,
        revision=args.revision,
        create_pr=args.create_pr,
        license=args.license,
        datasets=args.dataset,
    )
    sys.stdout.write(f"Pushed to {result.repo_id}:\n" + "".join(f"  {path}\n" for path in result.files))
    if result.kept_card:
        sys.stdout.write("The repository has a card of its own (README.md), which was kept.\n")
    sys.stdout.write(f"{result.url}\n")


def _add_pull(commands) -> None:
    pull = commands.add_parser(
        "pull",
        help="fetch a schedule from the Hub, with what belongs to it",
        description="Fetch a schedule from the Hub with its card, acceptance table, pictures and DistillSparse "
        "adapter. Sizes are checked before the download, contents before anything is written.",
    )
    pull.set_defaults(run=_run_pull)
    add = pull.add_argument
    add("repo_id", help="model repository, user/name")
    add("--output_dir", type=Path, metavar="FOLDER", help="folder to write to, by default the repository's name")
    add("--revision", help="branch, tag or commit")
    add("--overwrite", action="store_true", help="replace files with other contents")


def _run_pull(args: argparse.Namespace) -> None:
    from .hub import pull_schedule

    folder = args.output_dir if args.output_dir is not None else Path(args.repo_id.rpartition("/")[2])
    written = pull_schedule(args.repo_id, folder, revision=args.revision, overwrite=args.overwrite)
    sys.stdout.write("".join(f"Wrote {path}\n" for path in written))


def _add_find(commands) -> None:
    find = commands.add_parser(
        "find",
        help="list schedules on the Hub",
        description="List schedules on the Hub, the most downloaded first.",
    )
    find.set_defaults(run=_run_find)
    add = find.add_argument
    add("text", nargs="?", help="part of the repository's name")
    add("--base_model", metavar="ID", help="model that they were made for, such as Qwen/Qwen3-4B")
    add("--author", help="user or organization")
    add("--limit", type=int, default=20, metavar="N", help="most to list (%(default)s)")


def _run_find(args: argparse.Namespace) -> None:
    from .hub import find_schedules
    from .tables import make_console

    if args.limit < 1:
        raise ValueError(f"--limit must be positive, got {args.limit}.")
    table = find_schedules(base_model=args.base_model, author=args.author, search=args.text, limit=args.limit)
    console = make_console()
    if table.rows:
        table.print(console)
    else:
        console.print("The Hub has no such schedule.")
