"""`saggar node`: ranks of this machine for the engine of a worker on another one."""

from __future__ import annotations

import logging
import sys

import click


@click.command()
@click.option("--address", "--node-address", required=True, help="host:port of the worker's --node-address.")
@click.option(
    "--nodes", type=int, required=True, help="How many machines there are, as the worker's --nodes."
)
@click.option(
    "--node-rank", type=int, required=True, help="Which of them this is: 1, 2, ...; the worker's is 0."
)
@click.option(
    "--key-file", "--node-key-file", help="Holds the shared key.  [env: SAGGAR_NODE_KEY, the key itself]"
)
@click.option("--model", help="Where this machine has the weights.  [default: where the worker's has them]")
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info")
def node(
    address: str, nodes: int, node_rank: int, key_file: str | None, model: str | None, log_level: str
) -> None:
    """Start ranks here when the worker asks for them, and end them when it does.

    It waits for a worker that is not there, and outlives its restarts; SIGTERM or Ctrl-C ends it. Exit status 1: the
    worker has another key or another number of nodes.
    """
    from saggar.engine.config import Nodes
    from saggar.engine.executor.agent import Place, serve
    from saggar.workers.supervisor import LOG_FORMAT

    place = Place(Nodes(nodes, address, key_file), node_rank, model)
    logging.basicConfig(level=log_level.upper(), format=LOG_FORMAT)
    sys.exit(serve(place))
