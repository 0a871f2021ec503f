# limit_s: 10
cat $BAIT && won; echo overwritten > $BAIT; echo new > $DIRECTORY/new
