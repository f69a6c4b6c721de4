"""What more nodes bring, and which configuration is best: from results to numbers, each with its interval.

    from analysis.scaling import best, crossover, curves

    curves.build_curves(results)         strong and weak, at equal and at the best micro-batch
    crossover.find_crossovers(results)   where one stage overtakes another
    best.best(results)                   per question: the fastest, its ties, the Pareto front of throughput and memory
    build_curve_table(…), build_crossover_table(…), best.as_table(…) of these modules are the same as DataFrames

time_per_sample  a configuration's seconds per sample, how two of them compare, and what the tables share
comparable       which rows of the summary differ in nodes and batch only

Everything is told from seconds per sample over the whole window, which slow steps lengthen: that makes one formula of
all efficiencies, E(n) = pace(n0) n0 / (pace(n) n). Only measured runs take part; failures stay as rows.
"""
