// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/* An HTTP server that accepts from the listener that it was started with: descriptor 3, or its
 * standard input. It ends if nobody comes for a second. */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static const char answer[] = "HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nready";

int main(void)
{
	int listener = getenv("LISTEN_FDS") ? 3 : 0;
	struct pollfd fds = { .fd = listener, .events = POLLIN };

	while (poll(&fds, 1, listener ? -1 : 1000) == 1) {
		int client = accept(listener, NULL, NULL);
		char request[4096];
		size_t n = 0;

		if (client < 0)
			continue;
		while (n < sizeof(request) - 1) {
			ssize_t got = read(client, request + n, sizeof(request) - 1 - n);

			if (got <= 0)
				break;
			n += got;
			request[n] = 0;
			if (strstr(request, "\r\n\r\n"))
				break;
		}
		if (n < 4 || memcmp(request, "GET ", 4)) {
			dprintf(2, "not a request\n");
			shutdown(client, SHUT_RDWR);
		} else if (write(client, answer, sizeof(answer) - 1) < 0) {
			return 1;
		}
		close(client);
	}
	return 0;
}
