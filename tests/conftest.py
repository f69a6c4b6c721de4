from hypothesis import settings

settings.register_profile("patient", deadline=None)  # an example may take long on a busy machine, and be right
settings.load_profile("patient")
