"""Recorded memory that predictions are compared with: of real runs and, made here, of one rehearsed rank of many.

  python -m bench.prediction_inputs.rehearsals [FOLDER]   ten minutes; writes rehearsed.csv
  python -m bench.prediction_inputs.beside_real [FOLDER]  ten minutes; writes rehearsed_beside_real.csv

FOLDER is that of results, as in a checkout; default: results. `zeroscale predictions` reads what is written.
"""
