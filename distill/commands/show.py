"""`understudy show`: a finished run on the screen, or as a page."""

from distill.commands.options import ShowRunOptions
from distill.report.money import parse_prices
from distill.report.page import write_page
from distill.report.screen import show_run


def show(options: ShowRunOptions) -> None:
    """Print the verdict, or write the page of a result and print its name.

    Raises UserError: as `show_run` and `write_page`, and for invalid prices.
    """
    prices = parse_prices(options.price_per_hour)
    if options.page is not None:
        print(write_page(options.run, options.page, prices))
    else:
        show_run(options.run, prices)
