"""The verbs that read: one small file each, loaded when it is called."""
