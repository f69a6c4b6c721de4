"""Parts of data sources: a corpus with its tokenizer, T5's span corruption, and batches by torch's loader."""
