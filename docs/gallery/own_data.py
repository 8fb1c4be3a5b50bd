"""Your own data.

A table has one row per sample: one column says whose sample it is, one is to be predicted, and the others are
features. Here eight shops sell ice cream or soup, and the table does not say which. Ice cream sells more on warm days,
soup on cold days. So one model for all shops can learn nothing from the temperature.

The script writes such a table to `shops.csv`, trains on the file, and predicts tomorrow's sales of two shops from a
pandas frame. Numbers are standardised and words become one-hot, by the training rows alone. This encoding is kept with
the result, so that new rows are read in the same way and predictions come with the names of the classes.
"""

import csv

import numpy as np
import pandas

import fedem

rng = np.random.default_rng(0)
SHOPS = {f"shop {letter}": "ice cream" if letter in "ACEG" else "soup" for letter in "ABCDEFGH"}

with open("shops.csv", "w", newline="", encoding="utf-8") as file:
    writer = csv.writer(file)
    writer.writerow(["shop", "weekday", "temperature", "sold"])
    for shop, goods in SHOPS.items():
        for _ in range(80):
            weekday, temperature = rng.choice(["Friday", "Saturday"]), rng.normal(15, 8)
            warmth = (temperature - 15) / 8 * (1 if goods == "ice cream" else -1)
            demand = 2 * warmth + 0.5 * (weekday == "Saturday") + 0.3 * rng.normal()
            writer.writerow([shop, weekday, f"{temperature:.1f}", "many" if demand > 0 else "few"])

data = fedem.FromFile(path="shops.csv", client_column="shop", target_column="sold").make(seed=0)
print(data.encoding.describe())

result = fedem.train(data, "fedem", num_components=2, rounds=40, learning_rate=1.0)
single = fedem.train(data, "fedavg", rounds=40)
print(f"FedEM   {result.summary['test_accuracy']:.3f}")
print(f"FedAvg  {single.summary['test_accuracy']:.3f}")

tomorrow = pandas.DataFrame({"weekday": ["Saturday", "Saturday"], "temperature": [29.0, 2.0]})
for shop in ("shop A", "shop B"):
    for temperature, row in zip(tomorrow["temperature"], result.predict(shop, tomorrow), strict=True):
        print(f"{shop} ({SHOPS[shop]}) at {temperature:.0f} degrees sells {data.label_names[int(row.argmax())]}")
