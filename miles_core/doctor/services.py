"""Ray, and the GPUs that it must have."""

from __future__ import annotations

import os
import socket
from urllib.parse import urlsplit

from miles_core.doctor.check import Finding, passed, stopped
from miles_core.doctor.subject import Subject
from miles_core.runtime.ports import free_ports

_SECONDS = 5.0


def ray(subject: Subject) -> Finding:
    """The cluster at RAY_ADDRESS answers and can be joined; without one, a head can listen on loopback."""
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        return passed(
            f"RAY_ADDRESS is unset: a head of the run's own is started on loopback, port {free_ports()[0]} is free"
        )
    place = urlsplit(address if "://" in address else f"//{address}")
    if place.hostname and place.port:
        try:
            socket.create_connection((place.hostname, place.port), _SECONDS).close()
        except OSError as fault:
            return stopped(
                f"nothing answers at RAY_ADDRESS {address} ({fault})", "start Ray there, or unset RAY_ADDRESS"
            )
    there = subject.cluster_resources
    return passed(f"the cluster at {address} has {there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs")


def gpus(subject: Subject) -> Finding:
    """A GPU for each trainer rank and each engine, where the run is to use GPUs."""
    cluster, there = subject.config.cluster, len(subject.gpus)
    ranks, engines = cluster.actor_num_nodes * cluster.actor_num_gpus_per_node, cluster.rollout_num_engines
    if subject.device == "cpu":
        if subject.config.rollout.diffusion_generator_device == "cuda":
            return stopped(
                "--diffusion-generator-device is cuda and there is no GPU", "--diffusion-generator-device cpu"
            )
        return passed(f"none is needed: {ranks} trainer ranks and {engines} engines run on the CPU")
    found = f"{ranks} trainer ranks and {engines} engines take a GPU each and there are {there}"
    if there < ranks + engines:
        return stopped(found, "--device cpu, or fewer by --actor-num-gpus-per-node and --rollout-num-engines")
    return passed(found)
