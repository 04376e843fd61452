package main

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// Produces each line of the input, or consumes in a group, while brokers fail. The test
// tests/interop/test_interop_failover.py describes the output.
func runFailover(role, address, topic, group string) error {
	options := []kgo.Opt{kgo.SeedBrokers(strings.Split(address, ",")...)}
	ctx := context.Background()
	if role == "consume" {
		client, err := kgo.NewClient(append(options, kgo.ConsumerGroup(group), kgo.ConsumeTopics(topic),
			kgo.AutoCommitInterval(200*time.Millisecond), kgo.ConsumeResetOffset(kgo.NewOffset().AtStart()))...)
		if err != nil {
			return err
		}
		for {
			client.PollFetches(ctx).EachRecord(func(record *kgo.Record) {
				fmt.Printf("read %d %d %s\n", record.Partition, record.Offset, record.Value)
			})
		}
	}
	client, err := kgo.NewClient(append(options, kgo.DefaultProduceTopic(topic), kgo.RecordDeliveryTimeout(180*time.Second))...)
	if err != nil {
		return err
	}
	var mutex sync.Mutex
	input := bufio.NewScanner(os.Stdin)
	for input.Scan() {
		client.Produce(ctx, kgo.StringRecord(input.Text()), func(record *kgo.Record, err error) {
			mutex.Lock()
			defer mutex.Unlock()
			if err != nil {
				fmt.Printf("failed %s %v\n", record.Value, err)
			} else {
				fmt.Printf("acked %s\n", record.Value)
			}
		})
	}
	err = client.Flush(ctx)
	client.Close()
	return err
}
