"""The target `sockets`: each device of a cluster runs as a process, and the processes exchange tensors over TCP.

The modules, in the order in which a compiled network and then a frame (inference request) pass through them:

1. `target` defines the options. `emit` writes an artifact, and `artifact` loads it.
   `dicompiler_targets.engine_segments` converts segments for engines other than onnxruntime.
2. `deploy` copies an artifact to other hosts. `daemon_control` starts daemons there (resident devices).
3. `open_session` opens a session with new device processes or with resident devices.
4. `session` sends the user's frames to the devices and returns the outputs. `frame_reader` reads the frames of streams.
5. `cluster_state` starts the devices and reacts to their failures. It uses `device_connections`, `daemon_client` (for
   resident devices) and `failures`.
6. `runtime` runs on each device.

`in_process_session` replaces steps 4 to 6 for a single device on this host. `benchmark_player` measures the runtime.

This package imports nothing, because each device process imports it before its runtime.
"""
