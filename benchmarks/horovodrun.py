"""``horovodrun`` that does not check whether Horovod was built with Gloo.

For that check, the stock ``horovodrun`` imports TensorFlow, which takes longer than starting the ranks.
Without Gloo, the ranks fail at their start.
"""

if __name__ == "__main__":
    # Here, because each rank's middleman imports this module, too, but needs none of it.
    from horovod.runner import launch

    launch.gloo_built = lambda verbose=False: True
    launch.run_commandline()
