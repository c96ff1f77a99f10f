"""From layers and a plan to a program, by the same steps for all kinds of splits.

    LayerGraph + Plan --routing--> a valid plan
    Layer + Part      --bounds_inference--> Task: the Piece that each node computes, and the regions that the task reads
    tasks             --routing--> Routing: tasks with results that are read, and the tensor regions that they exchange
    Routing + model   --placement--> PlacedGraph: nodes with a device, a lane and a position in time
    PlacedGraph       --placed_model--> placed Model
    placed Model      --segmentation--> Program

A lane is a group of a device's parts; the device computes one lane after another. `tiling` computes parts along named
axes (height, width, channel) for passes and strategies, and `lowering` combines all steps.
"""
