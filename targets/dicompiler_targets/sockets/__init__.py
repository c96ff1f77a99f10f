"""The target `sockets`, which writes a directory for each device. The devices are processes that communicate over TCP.

The modules, in the order in which they are used for a compiled network and then for a frame (inference request):

1. `target` defines the options. `emit` writes an artifact, and `artifact` loads it.
   `dicompiler_targets.engine_segments` converts segments for engines other than onnxruntime.
2. `deploy` copies an artifact to other hosts. `daemon_control` starts resident devices there.
3. `open_session` decides where the devices run, and opens the session.
4. `session` reads the user's frames, sends them to the devices and returns the outputs.
5. `cluster_state` knows which devices are up. It starts them, accepts their connections and receives their messages
   (`device_connections`), or calls resident devices (`daemon_client`). It reacts to failures (`failures`).
6. `runtime` runs on each device.

`in_process_session` replaces steps 4 to 6 for a single device on this host. `benchmark_player` measures the runtime.

This package imports nothing, because each device process imports it before its runtime.
"""
