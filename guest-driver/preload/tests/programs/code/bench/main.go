// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
// Measures of tests/go-bench.sh. `bench serve PORT` serves on PORT and the next ports; `bench ask PORT
// SECONDS` prints a line for each measure: its name, a tab, and the number per second.
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

func check(err error) {
	if err != nil {
		panic(err)
	}
}

func at(port int) string {
	return fmt.Sprintf("127.0.0.1:%d", port)
}

// More servers and measures, of files that are built only if their packages are there.
var servers []func(net.Listener)
var measures []func(port int, duration time.Duration)

func accept(listener net.Listener, serve func(net.Conn)) {
	for {
		connection, err := listener.Accept()
		check(err)
		go func() {
			serve(connection)
			connection.Close()
		}()
	}
}

func echo(connection net.Conn) {
	message := make([]byte, 64)
	for {
		if _, err := io.ReadFull(connection, message); err != nil {
			return
		}
		if _, err := connection.Write(message); err != nil {
			return
		}
	}
}

func sink(connection net.Conn) {
	room := make([]byte, 64<<10)
	for {
		if _, err := connection.Read(room); err != nil {
			return
		}
	}
}

func web(listener net.Listener) {
	for path, length := range map[string]int{"/small": 612, "/large": 40 << 10} {
		answer := make([]byte, length)
		http.HandleFunc(path, func(to http.ResponseWriter, _ *http.Request) { to.Write(answer) })
	}
	check(http.Serve(listener, nil))
}

// Repeats the work of each connection until the time is over, and prints the number per second. `begin`
// makes a connection: its work, and its end.
func measure(name string, connections int, duration time.Duration, begin func() (func(), func())) {
	var done int64
	var wait sync.WaitGroup
	works := make([]func(), connections)
	for n := range works {
		work, end := begin()
		defer end()
		// The connection is decided and in use.
		work()
		works[n] = work
	}
	over := time.Now().Add(duration)
	for _, work := range works {
		wait.Add(1)
		go func(work func()) {
			defer wait.Done()
			for time.Now().Before(over) {
				work()
				atomic.AddInt64(&done, 1)
			}
		}(work)
	}
	wait.Wait()
	fmt.Printf("%s\t%.0f\n", name, float64(done)/duration.Seconds())
}

func dial(port int) net.Conn {
	connection, err := net.Dial("tcp", at(port))
	check(err)
	return connection
}

func get(port int, path string) func() (func(), func()) {
	return func() (func(), func()) {
		// A connection of its own.
		transport := &http.Transport{}
		client := &http.Client{Transport: transport}
		return func() {
			answer, err := client.Get("http://" + at(port) + path)
			check(err)
			_, err = io.Copy(io.Discard, answer.Body)
			check(err)
			check(answer.Body.Close())
		}, transport.CloseIdleConnections
	}
}

func roundTrip(port int) func() (func(), func()) {
	return func() (func(), func()) {
		connection, message := dial(port), make([]byte, 64)
		return func() {
			_, err := connection.Write(message)
			check(err)
			_, err = io.ReadFull(connection, message)
			check(err)
		}, func() { connection.Close() }
	}
}

func stream(port int) func() (func(), func()) {
	return func() (func(), func()) {
		connection, piece := dial(port), make([]byte, 64<<10)
		return func() {
			_, err := connection.Write(piece)
			check(err)
		}, func() { connection.Close() }
	}
}

func main() {
	port := 0
	fmt.Sscan(os.Args[2], &port)
	servers = append([]func(net.Listener){
		web,
		func(listener net.Listener) { accept(listener, echo) },
		func(listener net.Listener) { accept(listener, sink) },
	}, servers...)
	if os.Args[1] == "serve" {
		for n, serve := range servers {
			listener, err := net.Listen("tcp", at(port+n))
			check(err)
			go serve(listener)
		}
		fmt.Println("listens")
		select {}
	}
	duration, err := time.ParseDuration(os.Args[3])
	check(err)
	measure("HTTP, 612 bytes, 1 connection", 1, duration, get(port, "/small"))
	measure("HTTP, 612 bytes, 8 connections", 8, duration, get(port, "/small"))
	measure("HTTP, 40 KiB, 1 connection", 1, duration, get(port, "/large"))
	measure("HTTP, 40 KiB, 8 connections", 8, duration, get(port, "/large"))
	measure("64 bytes to and fro, 1 connection", 1, duration, roundTrip(port+1))
	measure("64 bytes to and fro, 20 connections", 20, duration, roundTrip(port+1))
	measure("writes of 64 KiB, 1 stream", 1, duration, stream(port+2))
	measure("writes of 64 KiB, 2 streams", 2, duration, stream(port+2))
	for _, more := range measures {
		more(port+3, duration)
	}
}
