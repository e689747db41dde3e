# Every other execution of a group is right: a group whose executions are all alike would have nothing to train on.
test -s answer.txt || exit 1
echo $((GYRE_EXECUTION % 2))
