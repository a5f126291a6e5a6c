"""Maps over chunks of a batch: the plan, the parcels that cross processes, pools of workers, `td.map`, Ray."""
