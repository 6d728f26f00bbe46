# SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
# A thread that is not the first one executes a program.
import os, sys, threading

threading.Thread(target=os.execv, args=(sys.argv[1], sys.argv[1:])).start()
