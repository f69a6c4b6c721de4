"""Components of data sources: corpora and tokenizers, T5's span corruption, and loading of micro-batches with torch's
DataLoader."""
