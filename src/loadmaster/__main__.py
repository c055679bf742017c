from loadmaster.cli import main

main()
