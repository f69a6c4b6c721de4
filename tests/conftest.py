import os
import signal
import tempfile

from hypothesis import settings

settings.register_profile("patient", deadline=None)  # an example may take long on a busy machine, and be right
settings.load_profile("patient")

# `nohup make test &` begins with it ignored, and so would all that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

# local runs of a session of tests wait for each other, and not for those of another
_SESSION = tempfile.TemporaryDirectory(prefix="zeroscale-tests-")
os.environ["XDG_RUNTIME_DIR"] = _SESSION.name
