// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// A server at a limit of descriptors, in one of the ways in which servers wait, and its clients. It
// ends with an error when a call finds no descriptor.
//
//   limited epoll|poll|select|threads|thread-poll PORT CLIENTS LIMIT
//   limited client PORT CLIENTS
#include <arpa/inet.h>
#include <err.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <unistd.h>

enum { WORD = 4, MOST = 20000 };

static struct sockaddr_in address(int port)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(port) };
	to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	return to;
}

// Returns 0 when the client has closed.
static int echo(int fd)
{
	char word[WORD];
	ssize_t n = recv(fd, word, sizeof(word), MSG_WAITALL);
	if (n < 0)
		err(1, "recv");
	if (n > 0 && send(fd, word, n, MSG_NOSIGNAL) != n)
		err(1, "send");
	return n > 0;
}

static int next_client(int listener)
{
	int fd = accept(listener, NULL, NULL);
	if (fd < 0)
		err(1, "accept");
	// As a server that opens the file of a request.
	int file = open("/dev/null", O_RDONLY);
	if (file < 0)
		err(1, "open");
	close(file);
	return fd;
}

static void by_epoll(int listener, int clients)
{
	int set = epoll_create1(0);
	struct epoll_event event = { .events = EPOLLIN, .data.fd = listener };
	if (set < 0 || epoll_ctl(set, EPOLL_CTL_ADD, listener, &event))
		err(1, "epoll");
	while (clients > 0) {
		struct epoll_event events[64];
		int n = epoll_wait(set, events, 64, -1);
		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd;
			if (fd == listener) {
				event.data.fd = next_client(listener);
				if (epoll_ctl(set, EPOLL_CTL_ADD, event.data.fd, &event))
					err(1, "EPOLL_CTL_ADD");
			} else if (!echo(fd)) {
				close(fd);
				clients--;
			}
		}
	}
}

static void by_poll(int listener, int clients)
{
	static struct pollfd fds[MOST];
	int count = 1;
	fds[0] = (struct pollfd){ .fd = listener, .events = POLLIN };
	while (clients > 0) {
		if (poll(fds, count, -1) < 0)
			err(1, "poll");
		for (int i = count - 1; i > 0; i--) {
			if (fds[i].revents && !echo(fds[i].fd)) {
				close(fds[i].fd);
				fds[i] = fds[--count];
				clients--;
			}
		}
		if (fds[0].revents)
			fds[count++] = (struct pollfd){ .fd = next_client(listener), .events = POLLIN };
	}
}

static void by_select(int listener, int clients)
{
	fd_set all;
	int highest = listener;
	FD_ZERO(&all);
	FD_SET(listener, &all);
	while (clients > 0) {
		fd_set ready = all;
		if (select(highest + 1, &ready, NULL, NULL, NULL) < 0)
			err(1, "select");
		for (int fd = 0; fd <= highest; fd++) {
			if (fd != listener && FD_ISSET(fd, &ready) && !echo(fd)) {
				close(fd);
				FD_CLR(fd, &all);
				clients--;
			}
		}
		if (FD_ISSET(listener, &ready)) {
			int fd = next_client(listener);
			if (fd >= FD_SETSIZE)
				errx(1, "%d is no number for select", fd);
			FD_SET(fd, &all);
			highest = fd > highest ? fd : highest;
		}
	}
}

static int polls;

static void *serve(void *argument)
{
	int fd = (int)(long)argument;
	struct pollfd one = { .fd = fd, .events = POLLIN };
	do {
		if (polls && poll(&one, 1, -1) < 0)
			err(1, "poll");
	} while (echo(fd));
	close(fd);
	return NULL;
}

static void by_threads(int listener, int clients)
{
	pthread_t threads[MOST];
	pthread_attr_t small;
	pthread_attr_init(&small);
	pthread_attr_setstacksize(&small, 64 << 10);
	for (int i = 0; i < clients; i++) {
		void *fd = (void *)(long)next_client(listener);
		if (pthread_create(&threads[i], &small, serve, fd))
			errx(1, "pthread_create");
	}
	for (int i = 0; i < clients; i++)
		pthread_join(threads[i], NULL);
}

static void client(int port, int clients)
{
	static int fds[MOST];
	struct sockaddr_in to = address(port);
	for (int i = 0; i < clients; i++) {
		fds[i] = socket(AF_INET, SOCK_STREAM, 0);
		if (fds[i] < 0 || connect(fds[i], (struct sockaddr *)&to, sizeof(to)))
			err(1, "connect %d", i);
	}
	for (int round = 0; round < 2; round++) {
		for (int i = 0; i < clients; i++) {
			char word[WORD];
			if (send(fds[i], "ping", WORD, MSG_NOSIGNAL) != WORD)
				err(1, "send %d", i);
			if (recv(fds[i], word, WORD, MSG_WAITALL) != WORD || memcmp(word, "ping", WORD))
				err(1, "recv %d", i);
		}
	}
	printf("answered %d\n", clients);
}

int main(int argc, char **argv)
{
	if (argc < 4)
		errx(2, "arguments");
	const char *way = argv[1];
	int port = atoi(argv[2]), clients = atoi(argv[3]), on = 1;
	// Descriptors that the parent has left open would count.
	for (int fd = 3; fd < MOST; fd++)
		close(fd);
	struct rlimit limit;
	getrlimit(RLIMIT_NOFILE, &limit);
	limit.rlim_cur = limit.rlim_max;
	if (argc > 4)
		limit.rlim_cur = limit.rlim_max = atoi(argv[4]);
	if (setrlimit(RLIMIT_NOFILE, &limit))
		err(1, "setrlimit");
	if (!strcmp(way, "client")) {
		client(port, clients);
		return 0;
	}
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	struct sockaddr_in at = address(port);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(listener, (struct sockaddr *)&at, sizeof(at)) || listen(listener, 1024))
		err(1, "listen");
	polls = !strcmp(way, "thread-poll");
	if (!strcmp(way, "epoll"))
		by_epoll(listener, clients);
	else if (!strcmp(way, "poll"))
		by_poll(listener, clients);
	else if (!strcmp(way, "select"))
		by_select(listener, clients);
	else
		by_threads(listener, clients);
	printf("served\n");
	return 0;
}
