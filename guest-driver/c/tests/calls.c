// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
/*
 * What the calls of smc.h do, one case a run: `calls CASE CARRIER POOL DEVICE`.
 *
 * CARRIER is "smc" or "tcp", POOL a device pool, DEVICE the socket of one more device. Both ends of
 * each connection are in this process, on two stacks.
 */
#define _POSIX_C_SOURCE 200809L

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <smc.h>

#define CHECK(what) \
	do { \
		if (!(what)) \
			fail(__LINE__, #what); \
	} while (0)
/* A call that has to return -1 with this errno, and words. */
#define FAILS(call, code) \
	do { \
		errno = 0; \
		if ((call) != -1 || errno != (code) || !*smc_last_error()) \
			fail(__LINE__, #call " has to fail with " #code); \
	} while (0)
/* As FAILS, of a call that has to return NULL. */
#define NO(call, code) FAILS((call) ? 0 : -1, code)

static int is_smc;
static const char *pool, *device;
static smc_stack *stacks[2];
static smc_socket *listener;

static void fail(int line, const char *what)
{
	int code = errno;

	fprintf(stderr, "line %d: %s: errno %d (%s): %s\n", line, what, code, strerror(code),
		smc_last_error());
	_exit(1);
}

static void sleep_ms(long millis)
{
	struct timespec time;

	time.tv_sec = millis / 1000;
	time.tv_nsec = millis % 1000 * 1000000;
	while (nanosleep(&time, &time) != 0)
		;
}

static long now_ms(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

static uint16_t port_of(smc_socket *socket)
{
	struct sockaddr_in name;
	socklen_t len = sizeof(name);

	CHECK(smc_getsockname(socket, (struct sockaddr *)&name, &len) == 0);
	CHECK(len == sizeof(name) && name.sin_family == AF_INET);
	return ntohs(name.sin_port);
}

/* An address of this host with a port that nobody else gets. The descriptor has it. */
static int bound(struct sockaddr_in *name)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	socklen_t len = sizeof(*name);

	memset(name, 0, sizeof(*name));
	name->sin_family = AF_INET;
	name->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)name, len) == 0);
	CHECK(getsockname(fd, (struct sockaddr *)name, &len) == 0);
	return fd;
}

static uint16_t port_without_listener(void)
{
	struct sockaddr_in name;

	CHECK(bound(&name) >= 0);
	return ntohs(name.sin_port);
}

static void *connect_client(void *unused)
{
	(void)unused;
	return smc_connect(stacks[0], "127.0.0.1", port_of(listener), 10000);
}

static void open_stacks(void)
{
	struct smc_options options = SMC_OPTIONS_INIT;
	int end;

	options.detect_timeout_ms = 10;
	options.recv_buffer = 16384;
	options.rnics = "none";
	for (end = 0; end < 2; end++)
		CHECK((stacks[end] = smc_stack_open(is_smc ? pool : "none", &options)));
	CHECK((listener = smc_listen(stacks[1], "127.0.0.1", 0)));
}

/* Two connected sockets: the client's and the server's. */
static void connect_both(smc_socket *ends[2])
{
	struct smc_info info;
	char text[200];
	pthread_t thread;
	void *client;
	int end;

	CHECK(pthread_create(&thread, NULL, connect_client, NULL) == 0);
	CHECK((ends[1] = smc_accept(listener)));
	CHECK(pthread_join(thread, &client) == 0);
	CHECK((ends[0] = (smc_socket *)client));
	for (end = 0; end < 2; end++) {
		CHECK(smc_get_info(ends[end], &info, sizeof(info)) == 0);
		CHECK(smc_info_text(ends[end], text, sizeof(text)) > 0);
		if (is_smc) {
			CHECK(info.carrier == SMC_CARRIER_SMCD && info.version == 2 && info.release == 1);
			CHECK(info.reason == 0 && info.local_buffer == 16384 && info.peer_buffer == 16384);
			CHECK(info.window == 1 && strncmp(text, "SMC-D v2.1", 10) == 0);
		} else {
			CHECK(info.carrier == SMC_CARRIER_TCP && info.version == 0 && info.reason != 0);
			CHECK(info.local_buffer == 0 && strncmp(text, "TCP (", 5) == 0);
		}
	}
}

static short ready(smc_socket *socket, short events, int timeout_ms)
{
	struct pollfd poll_fd;

	CHECK((poll_fd.fd = smc_fd(socket)) >= 0);
	poll_fd.events = events;
	poll_fd.revents = 0;
	CHECK(poll(&poll_fd, 1, timeout_ms) >= 0);
	return poll_fd.revents;
}

/* ---- Cases --------------------------------------------------------------------------------- */

static void null(void)
{
	char byte = 0;
	struct iovec piece;
	struct smc_info info;
	socklen_t len = sizeof(byte);
	smc_socket *ends[2];

	CHECK(strcmp(smc_last_error(), "") == 0);
	NO(smc_stack_open(NULL, NULL), EINVAL);
	NO(smc_connect(NULL, "127.0.0.1", 1, -1), EINVAL);
	NO(smc_connect_tcp(NULL, "127.0.0.1", 1, -1), EINVAL);
	NO(smc_listen(NULL, "127.0.0.1", 1), EINVAL);
	NO(smc_accept(NULL), EINVAL);
	FAILS(smc_shutdown(NULL, SHUT_RD), EINVAL);
	FAILS(smc_send(NULL, &byte, 1, 0), EINVAL);
	FAILS(smc_recv(NULL, &byte, 1, 0), EINVAL);
	piece.iov_base = NULL;
	piece.iov_len = 1;
	FAILS(smc_sendv(NULL, &piece, 1, 0), EINVAL);
	FAILS(smc_recvv(NULL, &piece, 1, 0), EINVAL);
	FAILS(smc_set_nonblocking(NULL, 1), EINVAL);
	FAILS(smc_get_nonblocking(NULL), EINVAL);
	FAILS(smc_fd(NULL), EINVAL);
	FAILS(smc_getsockname(NULL, NULL, &len), EINVAL);
	FAILS(smc_getpeername(NULL, NULL, &len), EINVAL);
	FAILS(smc_setsockopt(NULL, SOL_SOCKET, SO_LINGER, &byte, 1), EINVAL);
	FAILS(smc_getsockopt(NULL, SOL_SOCKET, SO_LINGER, &byte, &len), EINVAL);
	FAILS(smc_get_info(NULL, &info, sizeof(info)), EINVAL);
	FAILS(smc_info_text(NULL, &byte, 1), EINVAL);
	smc_close(NULL);
	smc_stack_close(NULL);

	open_stacks();
	connect_both(ends);
	NO(smc_connect(stacks[0], NULL, 1, -1), EINVAL);
	NO(smc_connect_tcp(stacks[0], NULL, 1, -1), EINVAL);
	NO(smc_listen(stacks[0], NULL, 0), EINVAL);
	FAILS(smc_send(ends[0], NULL, 1, 0), EINVAL);
	FAILS(smc_recv(ends[0], NULL, 1, 0), EINVAL);
	FAILS(smc_sendv(ends[0], NULL, 1, 0), EINVAL);
	FAILS(smc_recvv(ends[0], NULL, 1, 0), EINVAL);
	FAILS(smc_sendv(ends[0], &piece, 1, 0), EINVAL);
	FAILS(smc_recvv(ends[0], &piece, 1, 0), EINVAL);
	FAILS(smc_getsockname(ends[0], NULL, &len), EINVAL);
	FAILS(smc_getsockname(ends[0], (struct sockaddr *)&byte, NULL), EINVAL);
	FAILS(smc_setsockopt(ends[0], SOL_SOCKET, SO_KEEPALIVE, NULL, sizeof(int)), EINVAL);
	FAILS(smc_getsockopt(ends[0], SOL_SOCKET, SO_KEEPALIVE, NULL, &len), EINVAL);
	FAILS(smc_getsockopt(ends[0], SOL_SOCKET, SO_KEEPALIVE, &byte, NULL), EINVAL);
	FAILS(smc_get_info(ends[0], NULL, sizeof(info)), EINVAL);
	FAILS(smc_info_text(ends[0], NULL, 1), EINVAL);
	/* Nothing is asked of these pointers. */
	CHECK(smc_send(ends[0], NULL, 0, 0) == 0 && smc_recv(ends[0], NULL, 0, 0) == 0);
	CHECK(smc_info_text(ends[0], NULL, 0) > 0);
	/* The connection is as it was. */
	CHECK(smc_send(ends[0], "x", 1, 0) == 1 && smc_recv(ends[1], &byte, 1, 0) == 1 && byte == 'x');
}

static void wrong(void)
{
	struct smc_options options = SMC_OPTIONS_INIT;
	smc_socket *ends[2];
	struct timeval time = { 0, 1000000 };
	struct linger linger = { 1, -1 };
	struct iovec pieces[2];
	char room[64];
	socklen_t len;
	int one = 1;
	uint16_t port;

	NO(smc_stack_open("", NULL), EINVAL);
	NO(smc_stack_open("/nowhere/a.sock", NULL), ENODEV);
	CHECK(strstr(smc_last_error(), "/nowhere/a.sock"));
	options.spin_us = -2;
	NO(smc_stack_open(pool, &options), EINVAL);
	CHECK(strcmp(smc_last_error(), "spin_us is -2") == 0);
	options.spin_us = 0;
	options.size = 8;
	NO(smc_stack_open(pool, &options), EINVAL);
	options.size = sizeof(options);
	options.eids = "no EID";
	NO(smc_stack_open(pool, &options), EINVAL);

	open_stacks();
	connect_both(ends);
	port = port_of(listener);
	NO(smc_connect(stacks[0], "127.0.0.1", 0, -1), EINVAL);
	NO(smc_connect(stacks[0], "127.0.0.1", port, -2), EINVAL);
	NO(smc_connect(stacks[0], "\xff", port, -1), EINVAL);
	NO(smc_connect(stacks[0], "::1%nosuch", port, -1), ENOENT);
	CHECK(strstr(smc_last_error(), "::1%nosuch"));
	NO(smc_listen(stacks[1], "127.0.0.1", port), EADDRINUSE);
	NO(smc_listen(stacks[1], "192.0.2.1", 0), EADDRNOTAVAIL);
	port = port_without_listener();
	NO(smc_connect(stacks[0], "127.0.0.1", port, -1), ECONNREFUSED);
	NO(smc_connect(stacks[0], "127.0.0.1", port, 1000), ECONNREFUSED);
	NO(smc_connect_tcp(stacks[0], "127.0.0.1", port, 1000), ECONNREFUSED);

	NO(smc_accept(ends[0]), EINVAL);
	FAILS(smc_recv(listener, room, 1, 0), ENOTCONN);
	FAILS(smc_send(listener, room, 1, 0), ENOTCONN);
	CHECK(smc_shutdown(listener, SHUT_WR) == 0);
	FAILS(smc_info_text(listener, room, 1), ENOTCONN);
	FAILS(smc_shutdown(ends[0], 3), EINVAL);
	FAILS(smc_send(ends[0], room, 1, MSG_PEEK), EOPNOTSUPP);
	FAILS(smc_recv(ends[0], room, 1, MSG_MORE), EOPNOTSUPP);
	FAILS(smc_send(ends[0], room, (size_t)-1, 0), EINVAL);
	FAILS(smc_recv(ends[0], room, (size_t)-1, 0), EINVAL);
	FAILS(smc_sendv(ends[0], pieces, -1, 0), EINVAL);
	FAILS(smc_sendv(ends[0], pieces, 1025, 0), EINVAL);
	pieces[0].iov_base = pieces[1].iov_base = room;
	pieces[0].iov_len = pieces[1].iov_len = (size_t)-1 / 4 + 2;
	FAILS(smc_sendv(ends[0], pieces, 2, 0), EINVAL);
	FAILS(smc_recvv(ends[0], pieces, 2, 0), EINVAL);

	FAILS(smc_get_info(ends[0], (struct smc_info *)room, 4), EINVAL);
	FAILS(smc_setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)), EDOM);
	FAILS(smc_setsockopt(ends[0], SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)), EDOM);
	FAILS(smc_setsockopt(ends[0], SOL_SOCKET, SO_KEEPALIVE, &one, 3), EINVAL);
	FAILS(smc_setsockopt(ends[0], SOL_SOCKET, SO_DEBUG, &one, sizeof(one)), ENOPROTOOPT);
	FAILS(smc_setsockopt(ends[0], 12345, SO_KEEPALIVE, &one, sizeof(one)), ENOPROTOOPT);
	len = sizeof(room);
	FAILS(smc_getsockopt(ends[0], SOL_SOCKET, SO_DEBUG, room, &len), ENOPROTOOPT);
	len = 3;
	FAILS(smc_getsockopt(ends[0], SOL_SOCKET, SO_ERROR, room, &len), EINVAL);

	/* One that begins like a client of SMC and lies does not stop the others. */
	{
		static const unsigned char lie[] = { 0xe2, 0xd4, 0xc3, 0xd9, 1, 0xff, 0xff, 0x10 };
		struct sockaddr_in name;
		int liar = socket(AF_INET, SOCK_STREAM, 0);

		memset(&name, 0, sizeof(name));
		name.sin_family = AF_INET;
		name.sin_port = htons(port_of(listener));
		name.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		CHECK(liar >= 0 && connect(liar, (struct sockaddr *)&name, sizeof(name)) == 0);
		CHECK(write(liar, lie, sizeof(lie)) == sizeof(lie));
		if (is_smc)
			connect_both(ends);
		close(liar);
	}
}

static void busy(void)
{
	struct smc_options options = SMC_OPTIONS_INIT;
	smc_stack *stack;

	options.rnics = "none";
	CHECK((stack = smc_stack_open(device, &options)));
	options.device_timeout_ms = 0;
	NO(smc_stack_open(device, &options), EBUSY);
	smc_stack_close(stack);
	/* The daemon notices a moment later. */
	options.device_timeout_ms = 10000;
	CHECK((stack = smc_stack_open(device, &options)));
	smc_stack_close(stack);
}

static void *send_later(void *socket)
{
	sleep_ms(50);
	CHECK(smc_send((smc_socket *)socket, "89", 2, 0) == 2);
	return NULL;
}

static void bytes(void)
{
	smc_socket *ends[2];
	struct iovec pieces[3];
	struct sockaddr_storage name;
	char room[16], rest[16];
	socklen_t len = 4;
	pthread_t thread;
	int rounds = 0;
	ssize_t n;

	open_stacks();
	connect_both(ends);
	CHECK(smc_getpeername(ends[0], (struct sockaddr *)&name, &len) == 0);
	CHECK(len == sizeof(struct sockaddr_in));
	CHECK(ntohs(((struct sockaddr_in *)&name)->sin_port) == port_of(listener));

	CHECK(smc_send(ends[0], "0123", 4, MSG_NOSIGNAL) == 4);
	CHECK(smc_recv(ends[1], room, 3, MSG_PEEK) == 3 && memcmp(room, "012", 3) == 0);
	CHECK(smc_recv(ends[1], room, 2, 0) == 2 && memcmp(room, "01", 2) == 0);
	pieces[0].iov_base = (void *)"45";
	pieces[0].iov_len = 2;
	pieces[1].iov_base = NULL;
	pieces[1].iov_len = 0;
	pieces[2].iov_base = (void *)"67";
	pieces[2].iov_len = 2;
	CHECK(smc_sendv(ends[0], pieces, 3, 0) == 4);
	CHECK(pthread_create(&thread, NULL, send_later, ends[0]) == 0);
	pieces[0].iov_base = room;
	pieces[0].iov_len = 3;
	pieces[2].iov_base = rest;
	pieces[2].iov_len = 5;
	CHECK(smc_recvv(ends[1], pieces, 3, MSG_WAITALL) == 8);
	CHECK(memcmp(room, "234", 3) == 0 && memcmp(rest, "56789", 5) == 0);
	CHECK(pthread_join(thread, NULL) == 0);

	FAILS(smc_recv(ends[1], room, 1, MSG_OOB), EINVAL);
	CHECK(smc_send(ends[0], "ab!", 3, MSG_OOB) == 3);
	CHECK(ready(ends[1], POLLIN, 5000) & POLLIN);
	/* The kernel may bring it a little later. */
	do
		n = smc_recv(ends[1], room, 1, MSG_OOB);
	while (n != 1 && rounds++ < 5000 && (sleep_ms(1), 1));
	CHECK(n == 1 && room[0] == '!');
	CHECK(smc_recv(ends[1], room, 16, MSG_WAITALL | MSG_PEEK | MSG_DONTWAIT) == 2);
	CHECK(smc_recv(ends[1], room, 16, 0) == 2 && memcmp(room, "ab", 2) == 0);

	CHECK(smc_send(ends[0], "z", 1, 0) == 1 && smc_shutdown(ends[0], SHUT_WR) == 0);
	FAILS(smc_send(ends[0], "z", 1, 0), EPIPE);
	CHECK(smc_recv(ends[1], room, 16, MSG_WAITALL) == 1 && smc_recv(ends[1], room, 16, 0) == 0);
	CHECK(smc_send(ends[1], "y", 1, 0) == 1 && smc_recv(ends[0], room, 16, 0) == 1);
	smc_close(ends[1]);
	CHECK(smc_recv(ends[0], room, 16, 0) == 0);
	smc_close(ends[0]);

	/* What was not read is lost, and the peer is told. */
	connect_both(ends);
	CHECK(smc_send(ends[0], "lost", 4, 0) == 4);
	CHECK(smc_recv(ends[1], room, 1, 0) == 1);
	smc_close(ends[1]);
	while ((n = smc_recv(ends[0], room, 1, 0)) > 0)
		;
	CHECK(n == -1 && errno == ECONNRESET);
}

static void nonblocking(void)
{
	static char data[65536], room[65536];
	smc_socket *ends[2], *accepted;
	size_t sent = 0, received = 0;
	ssize_t n;

	open_stacks();
	connect_both(ends);
	CHECK(smc_get_nonblocking(ends[0]) == 0);
	FAILS(smc_recv(ends[0], room, 1, MSG_DONTWAIT), EAGAIN);
	CHECK(smc_set_nonblocking(ends[0], 1) == 0 && smc_get_nonblocking(ends[0]) == 1);
	FAILS(smc_recv(ends[0], room, 1, 0), EAGAIN);
	CHECK(ready(ends[0], POLLIN | POLLOUT, 0) == POLLOUT);
	for (n = 0; n < (ssize_t)sizeof(data); n++)
		data[n] = (char)(n % 251);
	/* Until nothing more is taken; the same bytes again and again. */
	while ((n = smc_send(ends[0], data + sent % sizeof(data), sizeof(data) - sent % sizeof(data), 0)) > 0)
		sent += (size_t)n;
	CHECK(n == -1 && errno == EAGAIN && sent >= 16000);
	/* The kernel's buffers may have room again. */
	if (is_smc) {
		FAILS(smc_send(ends[0], data, 1, MSG_DONTWAIT), EAGAIN);
		CHECK(ready(ends[0], POLLOUT, 0) == 0);
	}
	while (received < sent) {
		CHECK(ready(ends[1], POLLIN, 5000) & POLLIN);
		CHECK((n = smc_recv(ends[1], room, sizeof(room), MSG_DONTWAIT)) > 0);
		while (n > 0) {
			size_t at = received % sizeof(data), part = sizeof(data) - at;

			part = part < (size_t)n ? part : (size_t)n;
			CHECK(memcmp(room, data + at, part) == 0);
			memmove(room, room + part, (size_t)n - part);
			received += part;
			n -= (ssize_t)part;
		}
	}
	CHECK(ready(ends[0], POLLOUT, 5000) == POLLOUT);
	CHECK(smc_set_nonblocking(ends[0], 0) == 0);

	CHECK(smc_set_nonblocking(listener, 1) == 0 && smc_get_nonblocking(listener) == 1);
	NO(smc_accept(listener), EAGAIN);
	CHECK(ready(listener, POLLIN, 0) == 0);
	{
		pthread_t thread;
		void *client;

		CHECK(pthread_create(&thread, NULL, connect_client, NULL) == 0);
		do
			CHECK(ready(listener, POLLIN, 5000) == POLLIN);
		while (!(accepted = smc_accept(listener)) && errno == EAGAIN);
		CHECK(accepted && smc_get_nonblocking(accepted) == 0);
		CHECK(pthread_join(thread, &client) == 0 && client);
	}
}

static volatile sig_atomic_t signals;

static void note(int signal)
{
	(void)signal;
	signals++;
}

static void *shut_down_later(void *socket)
{
	sleep_ms(50);
	CHECK(smc_shutdown((smc_socket *)socket, SHUT_RD) == 0);
	return NULL;
}

static volatile sig_atomic_t has_ended;

/* Again and again: the first may come before the call that it is to end. */
static void *signal_until_ended(void *thread)
{
	while (!has_ended) {
		sleep_ms(20);
		CHECK(pthread_kill(*(pthread_t *)thread, SIGUSR1) == 0);
	}
	return NULL;
}

static void waits(void)
{
	static char data[1 << 22];
	struct timeval time = { 0, 60000 }, got;
	struct linger linger = { 1, 0 };
	struct sigaction action;
	smc_socket *ends[2];
	socklen_t len = sizeof(got);
	pthread_t thread, self = pthread_self();
	char room[16];
	long begun;
	ssize_t n;
	int value = 1;

	open_stacks();
	connect_both(ends);
	CHECK(smc_setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) == 0);
	CHECK(smc_getsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &got, &len) == 0);
	CHECK(len == sizeof(got) && got.tv_sec == 0 && got.tv_usec == 60000);
	begun = now_ms();
	FAILS(smc_recv(ends[0], room, 1, 0), EAGAIN);
	CHECK(now_ms() - begun >= 55);
	CHECK(smc_setsockopt(ends[0], SOL_SOCKET, SO_SNDTIMEO, &time, sizeof(time)) == 0);
	begun = now_ms();
	do
		n = smc_send(ends[0], data, sizeof(data), 0);
	while (n > 0);
	CHECK(n == -1 && errno == EAGAIN && now_ms() - begun >= 55);
	time.tv_usec = 0;
	CHECK(smc_setsockopt(ends[0], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time)) == 0);

	memset(&action, 0, sizeof(action));
	action.sa_handler = note;
	CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
	CHECK(pthread_create(&thread, NULL, signal_until_ended, &self) == 0);
	FAILS(smc_recv(ends[0], room, 1, 0), EINTR);
	has_ended = 1;
	CHECK(signals >= 1 && pthread_join(thread, NULL) == 0);

	CHECK(pthread_create(&thread, NULL, shut_down_later, ends[0]) == 0);
	CHECK(smc_recv(ends[0], room, 1, 0) == 0);
	CHECK(pthread_join(thread, NULL) == 0);

	CHECK(smc_setsockopt(ends[1], IPPROTO_TCP, TCP_NODELAY, &value, sizeof(value)) == 0);
	CHECK(smc_setsockopt(ends[1], SOL_SOCKET, SO_KEEPALIVE, &value, sizeof(value)) == 0);
	len = sizeof(value);
	value = 0;
	CHECK(smc_getsockopt(ends[1], IPPROTO_TCP, TCP_NODELAY, &value, &len) == 0 && value == 1);
	CHECK(smc_getsockopt(ends[1], SOL_SOCKET, SO_KEEPALIVE, &value, &len) == 0 && value == 1);
	CHECK(smc_getsockopt(ends[1], SOL_SOCKET, SO_ERROR, &value, &len) == 0 && value == 0);

	/* A listening socket: calls that wait end, and nobody can connect any more. */
	value = port_of(listener);
	CHECK(pthread_create(&thread, NULL, shut_down_later, listener) == 0);
	NO(smc_accept(listener), EINVAL);
	CHECK(pthread_join(thread, NULL) == 0);
	NO(smc_accept(listener), EINVAL);
	FAILS(smc_shutdown(listener, SHUT_RD), ENOTCONN);
	NO(smc_connect(stacks[0], "127.0.0.1", value, -1), ECONNREFUSED);

	/* A linger time of zero resets the connection. */
	CHECK(smc_setsockopt(ends[0], SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)) == 0);
	smc_close(ends[0]);
	while ((n = smc_recv(ends[1], data, sizeof(data), 0)) > 0)
		;
	CHECK(n == -1 && errno == ECONNRESET);
	smc_close(ends[1]);

	/* A server that accepts TCP and does not answer. */
	{
		struct sockaddr_in name;
		int silent = bound(&name);

		CHECK(listen(silent, 8) == 0);
		begun = now_ms();
		if (is_smc)
			NO(smc_connect(stacks[0], "127.0.0.1", ntohs(name.sin_port), 60), ETIMEDOUT);
		CHECK(now_ms() - begun < 5000);
		CHECK((ends[0] = smc_connect_tcp(stacks[0], "127.0.0.1", ntohs(name.sin_port), 1000)));
		CHECK(smc_info_text(ends[0], room, 6) > 6 && strcmp(room, "TCP (") == 0);
		close(silent);
	}
}

static void forks(void)
{
	smc_socket *ends[2];
	char room[16];
	int status;
	pid_t child;

	open_stacks();
	connect_both(ends);
	CHECK(smc_send(ends[0], "before", 6, 0) == 6);
	child = fork();
	CHECK(child >= 0);
	if (child == 0) {
		smc_stack *own;
		smc_socket *socket;

		FAILS(smc_recv(ends[1], room, 6, 0), EBADF);
		FAILS(smc_fd(listener), EBADF);
		NO(smc_connect(stacks[0], "127.0.0.1", 1, -1), EBADF);
		smc_close(ends[1]);
		smc_close(listener);
		smc_stack_close(stacks[1]);
		CHECK((own = smc_stack_open(is_smc ? pool : "none", NULL)));
		CHECK((socket = smc_listen(own, "127.0.0.1", 0)));
		smc_close(socket);
		smc_stack_close(own);
		_exit(0);
	}
	CHECK(waitpid(child, &status, 0) == child && status == 0);
	CHECK(smc_recv(ends[1], room, 16, 0) == 6 && memcmp(room, "before", 6) == 0);
	CHECK(smc_send(ends[1], "after", 5, 0) == 5 && smc_recv(ends[0], room, 16, 0) == 5);
	connect_both(ends);
}

static void closes(void)
{
	smc_socket *ends[2], *later;
	char byte;
	ssize_t n;
	int rounds = 0;

	open_stacks();
	connect_both(ends);
	/* Sockets outlive their stack, and an accepted one its listener. */
	smc_stack_close(stacks[0]);
	smc_stack_close(stacks[1]);
	smc_close(listener);
	CHECK(smc_send(ends[0], "x", 1, 0) == 1 && smc_recv(ends[1], &byte, 1, 0) == 1);
	smc_close(ends[1]);
	/* SIGPIPE would end this process. */
	do
		n = smc_send(ends[0], "x", 1, 0);
	while (n == 1 && rounds++ < 100 && (sleep_ms(1), 1));
	CHECK(n == -1 && (errno == EPIPE || errno == ECONNRESET));
	later = ends[0];
	CHECK(smc_info_text(later, &byte, 1) > 0 && byte == 0);
	smc_close(later);
}

/* As a daemon does at its start. */
static void closed(void)
{
	smc_socket *ends[2];
	long long begun;
	int fd, max = (int)sysconf(_SC_OPEN_MAX);

	open_stacks();
	connect_both(ends);
	for (fd = 3; fd < max && fd < 1 << 20; fd++)
		close(fd);
	/* The device is waited for in vain, some seconds at a time. */
	alarm(100);
	/* Other files take the numbers. */
	for (fd = 3; fd < 64; fd++)
		CHECK(dup(1) == fd);
	begun = now_ms();
	smc_close(ends[0]);
	smc_close(ends[1]);
	smc_close(listener);
	smc_stack_close(stacks[0]);
	smc_stack_close(stacks[1]);
	CHECK(now_ms() - begun < 90000);
}

/* The daemon ends when this has said that it is ready. */
static void gone(void)
{
	smc_socket *ends[2];
	char byte;

	open_stacks();
	connect_both(ends);
	puts("ready");
	fflush(stdout);
	CHECK(read(0, &byte, 1) == 0);
	/* SMC goes on over TCP. */
	CHECK(smc_send(ends[1], "x", 1, 0) == 1 && smc_recv(ends[0], &byte, 1, 0) == 1);
	smc_close(ends[0]);
	smc_close(ends[1]);
	is_smc = 0;
	connect_both(ends);
	CHECK(smc_send(ends[1], "x", 1, 0) == 1 && smc_recv(ends[0], &byte, 1, 0) == 1);
}

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*run)(void);
	} cases[] = {
		{ "null", null }, { "wrong", wrong }, { "busy", busy }, { "bytes", bytes },
		{ "nonblocking", nonblocking }, { "waits", waits }, { "forks", forks },
		{ "closes", closes }, { "closed", closed }, { "gone", gone },
	};
	size_t at;

	CHECK(argc == 5);
	is_smc = strcmp(argv[2], "smc") == 0;
	pool = argv[3];
	device = argv[4];
	/* A call that hangs is a failure. */
	alarm(30);
	for (at = 0; at < sizeof(cases) / sizeof(cases[0]); at++) {
		if (strcmp(cases[at].name, argv[1]) == 0) {
			cases[at].run();
			return 0;
		}
	}
	fprintf(stderr, "no case %s\n", argv[1]);
	return 2;
}
