"""Pipeline parallelism: schedules as tables of actions, and a runtime whose edges are reshard plans."""
