# limit_s: 10
cd /; cat ../../../../../../$BAIT && won; true
